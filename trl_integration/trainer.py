"""AgentGRPOTrainer: TRL's GRPO trainer with rollouts by an `agent_vllm` engine.

Owns when weights go to the engine, what a rollout is made of, and how trajectories reach TRL's own
code, which does the rest: rewards, advantages, loss, logging, saving. Invariant: every rollout is
sampled with the learner's current weights.
"""

import inspect
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from agent_vllm.chat import ChatFormat
from agent_vllm.engines import RolloutEngine
from agent_vllm.errors import EngineError
from agent_vllm.inspect import RolloutProgress
from agent_vllm.inspect.record import Redact
from agent_vllm.rollout import rollout_batch
from agent_vllm.status import RolloutStatus
from agent_vllm.tools import Tool, tool_name, tools_by_name
from agent_vllm.types import StopReason, Trajectory
from trl_integration.adapter import reward_columns, to_trl
from trl_integration.checks import check_arguments, check_setup
from trl_integration.config import AgentGRPOConfig
from trl_integration.engine_life import EngineLife, SyncAfterSteps
from trl_integration.interrupts import interrupted_afterwards
from trl_integration.ledger import Exclusion, exclusion, token_ledger
from trl_integration.metrics import GapMeter, ledger_metrics, rollout_metrics
from trl_integration.recording import RecordedRollout, TrainingRecord
from trl_integration.row_tools import select_tools

ToolFunctions = Sequence[Tool | Callable[..., Any]]


class AgentGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] whose completions are multi-turn tool trajectories sampled by a rollout engine.

    Only the generation is replaced: each sample is a coroutine of its own, the engine batches whoever waits for a
    token, and tools run meanwhile. Sampled tokens are trained with the engine's own log-probabilities; tool results and
    what the chat template writes are not.

    Example:

    ```python
    >>> from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

    >>> trainer = AgentGRPOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     reward_funcs=my_reward,
    ...     args=AgentGRPOConfig("out", max_turns=4),
    ...     train_dataset=dataset,
    ...     tools=[search, calculator],
    ...     rollout_engine="vllm",
    ... )
    >>> trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, and all others of [`~trl.GRPOTrainer`]:
            As there. Prompts must be conversational. `rollout_func` and `peft_config` are refused.
        args ([`AgentGRPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        tools (`list` or `Callable`, *optional*):
            What the model may call: Python functions (sync or async) with type hints and a Google-style docstring, or
            [`agent_vllm.Tool`]. A row's `tools` column, if there is one, picks from them by name. Instead of a list, a
            function that takes a dataset row and returns the row's own list.
        rollout_engine (`str` or [`agent_vllm.RolloutEngine`], *optional*, defaults to `"vllm"`):
            `"vllm"`, `"torch"`, or an engine built by you, which you close.
        chat_format ([`agent_vllm.ChatFormat`], *optional*):
            How conversations become ids and back. If `None`, it is made from the tokenizer's chat template.
        redact_rollouts (`Callable`, *optional*):
            With `record_rollouts`: gets each record before it is written and returns what is written instead, such as
            [`agent_vllm.inspect.redact_secrets`].
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: AgentGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        tools: ToolFunctions | Callable[[Mapping[str, Any]], ToolFunctions] | None = None,
        rollout_engine: str | RolloutEngine = "vllm",
        chat_format: ChatFormat | None = None,
        redact_rollouts: Redact | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = AgentGRPOConfig(f"{name.split('/')[-1]}-AgentGRPO")
        check_arguments(args, model, rollout_engine, train_dataset, eval_dataset, kwargs)
        self._tools_of_row = tools if callable(tools) else None
        self._tools = {} if callable(tools) else tools_by_name(tools)
        super().__init__(
            model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        check_setup(self)
        self.chat_format = chat_format or ChatFormat.from_tokenizer(
            self._tokenizer,
            eos_token_ids=self.eos_token_ids,
            template_kwargs=self.chat_template_kwargs,
            needs_tools=bool(self._tools or self._tools_of_row or self.environment_factories),
            escape_tool_results=self.args.escape_tool_results,
        )
        # TRL judges truncation by the last token; here the stop reason does, in the adapter.
        self.mask_truncated_completions = False
        # This switches on TRL's correction for the distance between engine and learner.
        self.use_vllm = args.old_logprobs == "recomputed"
        self._rollout_seconds = 0.0
        self.trajectories: list[Trajectory] = []  # of the latest rollout on this process
        self.engine_life = EngineLife(
            rollout_engine,
            args=args,
            accelerator=self.accelerator,
            tokenizer=self._tokenizer,
            learner=lambda: self.accelerator.unwrap_model(self.model),
        )
        self._gap = GapMeter()
        self._rollouts_at: dict[tuple[str, int], int] = {}  # how many at this mode and step
        self._record = None
        if args.record_rollouts:
            rank = self.accelerator.process_index
            self._record = TrainingRecord(args.output_dir, rank, self._tokenizer, redact_rollouts)
        self.add_callback(SyncAfterSteps(self.engine_life.learner_changed, self.sync_engine))

    def close(self) -> None:
        """Close the engine that this trainer built, and the record."""
        self.engine_life.close()
        if self._record is not None:
            self._record.close()

    @property
    def rollout_engine(self) -> RolloutEngine:
        return self.engine_life.engine

    @property
    def seconds(self) -> dict[str, float]:
        """What all rollouts and weight syncs so far took."""
        return {"rollout": self._rollout_seconds, "sync": self.engine_life.sync_seconds}

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with (
            interrupted_afterwards()
        ):  # half a checkpoint would be the last one, and can't be resumed
            super()._save_checkpoint(*args, **kwargs)

    # ---- weights ----

    def sync_engine(self) -> int:
        """
        Give the engine the learner's current weights.

        Returns:
            `int`: the engine's new policy version.
        """
        self._append_metrics("train", self.engine_life.sync())
        return self.rollout_engine.policy_version

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not self.is_in_train:  # nothing tells when weights change outside of training
            self.engine_life.learner_changed()
        return super().evaluate(*args, **kwargs)

    # ---- rollouts, in the order in which TRL calls these ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        inputs = [dict(row) for row in inputs]  # TRL adds columns, and samplers repeat row objects
        self._rows = [dict(row) for row in inputs]  # without what TRL adds
        output = super()._generate_and_score_completions(inputs)
        if self.args.old_logprobs == "sampler":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        trained = self._leave_out(output)
        if self._record is not None:
            learner = output.get("old_per_token_logps") if self.use_vllm else None
            output["row_number"] = self._record.write(
                self._recorded_rollout(output["advantages"], trained), learner
            )
        return output

    def _leave_out(self, output: dict[str, Any]) -> list[bool]:
        """
        Take whole trajectories out of the loss's mask, and keep the books of it.

        Returns:
            `list[bool]`: which trajectories are trained.
        """
        exclusions = [
            exclusion(t, mask_truncated=self.args.mask_truncated_completions, rewards=rewards)
            for t, rewards in zip(self.trajectories, self._rewards.tolist(), strict=True)
        ]
        trained = [reason is None for reason in exclusions]
        is_trained = torch.tensor(trained, device=output["completion_mask"].device).long()
        output["completion_mask"] = output["completion_mask"] * is_trained[:, None]
        num_trained = (output["completion_mask"] * output["tool_mask"]).sum()
        output["num_items_in_batch"] = self.accelerator.gather(num_trained).sum()
        ledger = token_ledger(self.trajectories, exclusions, int(num_trained))
        self._append_metrics(self._mode, ledger_metrics(ledger, self.accelerator))
        return trained

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        self._append_metrics("train", self.engine_life.ensure_current())
        self.trajectories = self._rollout(prompts)
        self._check_engine_answered()
        self._gap.expect(self._mode, self.rollout_engine.policy_version)
        fields = to_trl(
            self.trajectories,
            self._tokenizer.pad_token_id,
            mask_truncated=self.args.mask_truncated_completions,
        )
        self._log_rollout(self._mode)
        return (
            fields.prompt_ids,
            fields.completion_ids,
            fields.tool_mask,
            fields.completions,
            fields.logprobs,
            reward_columns(self.trajectories),
            None,  # images
            [],  # images in tool results
        )

    def _rollout(self, prompts: list[Any]) -> list[Trajectory]:
        mode = self._mode
        status = RolloutStatus()
        self._tools_of_rows = [self._row_tools(index) for index in range(len(prompts))]
        self._seed, self._started = self._rollout_seed(mode), time.time()
        stats_before = self.rollout_engine.stats()
        is_shown = self.args.rollout_progress and self.accelerator.is_main_process
        title = f"{mode} rollout at step {self.state.global_step}"
        with RolloutProgress(status, title, enabled=is_shown and not self.args.disable_tqdm):
            trajectories = rollout_batch(
                self.rollout_engine,
                self.chat_format,
                prompts,
                self._tools_of_rows,
                limits=self.args.limits(),
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k or 0,
                min_p=self.min_p or 0.0,
                stop_strings=self.args.stop_strings or (),
                thinking_ratio=self.args.thinking_ratio,
                seed=self._seed,
                status=status,
            )
        self._rollout_s = status.elapsed_s
        self._rollout_seconds += self._rollout_s
        stats = self.rollout_engine.stats()
        self._engine_stats = stats and stats_before and stats.since(stats_before)
        return trajectories

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        ids = [trajectory.completion_ids for trajectory in self.trajectories]  # without padding
        rewards = super()._calculate_rewards(inputs, prompts, completions, ids)
        failed = [exclusion(t) is Exclusion.FAILED for t in self.trajectories]
        failed = self.accelerator.gather(torch.tensor(failed, device=rewards.device))
        rewards[failed] = torch.nan  # half a trajectory must not move its group's baseline
        first = self.accelerator.process_index * len(prompts)
        self._rewards = rewards[first : first + len(prompts)]
        return rewards

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, compute_entropy: bool = False, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        scores_old_policy = model is self.model and not compute_entropy
        if scores_old_policy and self.args.old_logprobs == "sampler":
            return None, None, None  # the engine has them: no forward pass
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
            model, *args, compute_entropy=compute_entropy, **kwargs
        )
        if compute_entropy:
            self._learner_logps = logps.detach()
        return logps, entropies, aux_loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        mode = self._mode
        lag = self._gap.lag(mode, self.rollout_engine.policy_version)
        self._metrics[mode]["sampling/policy_version_lag"].append(float(lag))
        if lag == 0:  # engine and learner still hold the same weights
            self._measure_gap(mode, inputs)
        return loss

    def _measure_gap(self, mode: str, inputs: dict[str, Any]) -> None:
        gap = self._gap.measure(
            inputs["sampling_per_token_logps"],
            self._learner_logps,
            inputs["completion_mask"] * inputs["tool_mask"],
            self.accelerator,
        )
        self._append_metrics(mode, gap)
        if self._record is not None:
            self._record.amend(mode, inputs["row_number"], self._learner_logps)

    # ---- parts ----

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _row_tools(self, index: int) -> list[Tool | Callable[..., Any]]:
        row = self._rows[index]
        if self._tools_of_row is not None:
            tools = list(self._tools_of_row(row))
        else:
            tools = select_tools(row.get("tools"), self._tools)
        return tools + self._environment_methods(index)

    def _environment_methods(self, index: int) -> list[Callable[..., Any]]:
        if not self.environments:
            return []
        environment = self.environments[index]
        return [
            getattr(environment, name)
            for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
            if name not in ("reset", "get_reward") and not name.startswith("_")
        ]

    def _rollout_seed(self, mode: str) -> int:
        """Differs by rank, step and rollout; a resumed run goes on with the seeds it would have had."""
        key = (mode, self.state.global_step)
        self._rollouts_at = {key: self._rollouts_at.get(key, -1) + 1}
        text = f"{self.args.seed}/{self.accelerator.process_index}/{key}/{self._rollouts_at[key]}"
        return random.Random(text).getrandbits(63)

    def _check_engine_answered(self) -> None:
        """An engine that answered nobody is dead; going on would train on nothing."""
        reasons = {trajectory.stop_reason for trajectory in self.trajectories}
        if reasons == {StopReason.ENGINE_ERROR}:
            raise EngineError(
                f"The engine failed on all {len(self.trajectories)} trajectories of the rollout at "
                f"step {self.state.global_step}; the first error: {self.trajectories[0].error}"
            )

    def _log_rollout(self, mode: str) -> None:
        metrics, num_tokens = rollout_metrics(
            self.trajectories,
            seconds=self._rollout_s,
            stats=self._engine_stats,
        )
        if mode == "train":
            self.state.num_input_tokens_seen += num_tokens
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        self._append_metrics(mode, metrics)

    def _append_metrics(self, mode: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def _recorded_rollout(
        self, advantages: torch.Tensor, trained: Sequence[bool]
    ) -> RecordedRollout:
        names, mode = self.reward_func_names, self._mode
        return RecordedRollout(
            trajectories=self.trajectories,
            rows=[{k: v for k, v in row.items() if k != "prompt"} for row in self._rows],
            tools=[list(map(tool_name, tools)) for tools in self._tools_of_rows],
            rewards=[dict(zip(names, row, strict=True)) for row in self._rewards.tolist()],
            advantages=advantages.tolist(),
            trained=[is_in and mode == "train" for is_in in trained],
            mode=mode,
            step=self.state.global_step,
            rank=self.accelerator.process_index,
            num_generations=self.num_generations if mode == "train" else self.num_generations_eval,
            num_processes=self.accelerator.num_processes,
            seed=self._seed,
            started=self._started,
            temperature=self.temperature,
            max_model_len=self.rollout_engine.max_model_len,
        )
