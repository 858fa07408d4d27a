"""Score recorded rollouts with the trainer's own code: rewards, advantages, tensors and loss.

Owns a trainer whose rollouts are read instead of sampled. Invariant: with the model and settings of
the recorded run, the inputs of the loss and the loss itself equal those of that run to the last bit.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from agent_vllm.chat import TEXT_ROLE
from agent_vllm.errors import RecordError
from agent_vllm.record import ReplayRolloutEngine, RolloutRecord, batch_name, to_trajectory
from agent_vllm.types import Trajectory
from trl_integration.config import AgentGRPOConfig
from trl_integration.trainer import AgentGRPOTrainer
from trl_integration.training_rollout import TrainingRollout


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """Results for one recorded rollout. Lists and dim 0 of tensors have one entry per record."""

    inputs: dict[str, torch.Tensor]  # the inputs of TRL's loss
    rewards: list[dict[str, float]]  # by function; NaN where it returned None
    loss: float


class RescoringTrainer(AgentGRPOTrainer):
    """
    [`AgentGRPOTrainer`] for recorded rollouts, without an engine.

    Args:
        reward_funcs (`Callable` or `list[Callable]`):
            As in [`~trl.GRPOTrainer`]; they get what they got in the run, except environments.
        args ([`AgentGRPOConfig`], *optional*):
            Settings of the loss and the advantages; batch sizes are taken from the record.
        model ([`~transformers.PreTrainedModel`], *optional*):
            The learner. If `None`, the recorded logprobs of the learner take its place, and the engine's own where
            there are none.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's tokenizer.
    """

    def __init__(
        self,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        args: AgentGRPOConfig | None = None,
        model: PreTrainedModel | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._is_model_real = model is not None
        tokenizer = processing_class or _placeholder_tokenizer()
        super().__init__(
            model or _placeholder_model(),
            reward_funcs,
            args or rescoring_config(),
            Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}]),
            processing_class=tokenizer,
            rollout_engine=ReplayRolloutEngine([], tokenizer, max_model_len=1),
            chat_format=cast(Any, "none: conversations are read, not made"),
        )

    def rescore(self, records: Sequence[RolloutRecord]) -> Rescored:
        """
        Score one recorded rollout, all records of one process, and compute its loss.

        Raises:
            `RecordError`: groups are not whole, or the ids are redacted and a model wants them.
        """
        self._records = records
        self.num_generations = self.num_generations_eval = _group_size(records)
        self.state.global_step = records[0]["step"]
        self.current_gradient_accumulation_steps = 1
        self.model.train(records[0]["mode"] == "train")
        if self._is_model_real and min(min(r["completion_ids"], default=0) for r in records) < 0:
            raise RecordError(f"{batch_name(records[0])} has redacted ids; replay without a model.")
        rows = [{**r["row"], "prompt": _prompt(r)} for r in records]
        inputs = self._generate_and_score_completions(rows)
        with torch.no_grad():
            loss = self._compute_loss(self.model, inputs).item()
        rewards = [
            dict(zip(self.reward_func_names, row, strict=True))
            for row in self.rollout.rewards.tolist()
        ]
        return Rescored(inputs=inputs, rewards=rewards, loss=loss)

    def _sample(self, rollout: TrainingRollout, prompts: list[Any]) -> list[Trajectory]:
        """Read the trajectories instead of sampling them."""
        trajectories = [to_trajectory(record) for record in self._records]
        rollout.seconds = max((s.end_s for t in trajectories for s in t.spans), default=0.0)
        return trajectories

    def _give_up_rollout(self) -> None:
        """Score a lost rollout as it is."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, compute_entropy: bool = False, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        is_skipped = not compute_entropy and self.args.old_logprobs == "sampler"
        if self._is_model_real or is_skipped:
            return super()._get_per_token_logps_and_entropies(
                model, *args, compute_entropy=compute_entropy, **kwargs
            )
        _, _, num_columns = args
        self._learner_logps = torch.zeros(len(self._records), num_columns)
        for row, record in zip(self._learner_logps, self._records, strict=True):
            logprobs = record["learner_logprobs"] or record["logprobs"]
            row[: len(logprobs)] = torch.tensor(logprobs)
        return self._learner_logps, torch.zeros_like(self._learner_logps), None


def rescoring_config(**settings: Any) -> AgentGRPOConfig:
    """Return settings for scoring on a CPU, which write nothing."""
    defaults = {
        "output_dir": tempfile.gettempdir(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return AgentGRPOConfig(**{**defaults, **settings})


def _prompt(record: RolloutRecord) -> list[Any] | str:
    """Return the prompt as the dataset had it."""
    messages = record["messages"][: record["num_prompt_messages"]]
    is_text = [message.get("role") for message in messages] == [TEXT_ROLE]
    return messages[0]["content"] if is_text else messages


def _group_size(records: Sequence[RolloutRecord]) -> int:
    groups: dict[int, int] = {}
    for record in records:
        groups[record["group"]] = groups.get(record["group"], 0) + 1
    if len(set(groups.values())) > 1:
        raise RecordError(
            f"{batch_name(records[0])} has groups of {sorted(set(groups.values()))} samples; "
            "advantages need whole groups. Were lines taken out, or a group shared by processes?"
        )
    return next(iter(groups.values()))


def _placeholder_model() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2, hidden_size=2, intermediate_size=2, num_hidden_layers=1,
            num_attention_heads=1,
        )
    )  # fmt: skip


def _placeholder_tokenizer() -> PreTrainedTokenizerBase:
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
