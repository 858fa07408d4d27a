"""Train with TRL's GRPO trainer and rollouts by an `agent_vllm` engine.

Owns where in TRL's GRPO code a rollout begins, is sampled, scored and compared with the learner. TRL
does the rest: advantages, loss, logging, saving. Invariants: the old log-probabilities of the ratio are
those that `old_logprobs` names; no token is trained whose logprobs are too far from the learner's.
`trl_private` lists the methods of TRL that are overridden.
"""

import math
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import get_config_model_id

from agent_vllm.chat import ChatFormat
from agent_vllm.engines import RolloutEngine
from agent_vllm.engines.learner import runs_as_reference
from agent_vllm.engines.models import pad_token_id
from agent_vllm.environments import Factory
from agent_vllm.gateway import Agent
from agent_vllm.record import Redact
from agent_vllm.tools import shared_loop
from trl_integration.checks import check_arguments
from trl_integration.config import AgentGRPOConfig
from trl_integration.environments import UserOfRow
from trl_integration.fields import Exclusion, to_trl
from trl_integration.logprob_gap import Gap, GapMeter, max_mean_gap
from trl_integration.metrics import correction_metrics
from trl_integration.processes import gather_flags
from trl_integration.prompts import has_text_prompts
from trl_integration.rollout_mixin import Inputs, RolloutMixin, ToolsArgument
from trl_integration.run_checks import OnWarning, RunChecks, gap_warning
from trl_integration.shared_prefix import Scores, SharedPrefixMixin


class AgentGRPOTrainer(RolloutMixin, SharedPrefixMixin):
    """
    [`~trl.GRPOTrainer`] whose completions are multi-turn tool trajectories sampled by a rollout engine.

    Only the generation is replaced: each sample is a coroutine, the engine batches all that wait for a token, and tools
    run in the meantime. Sampled tokens are trained with the engine's own log-probabilities; tool results and the chat
    template's tokens are masked.

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
            As there. Prompts may be text where there are no tools, environment or user. `rollout_func` is refused.
        args ([`AgentGRPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        tools (`list` or `Callable`, *optional*):
            Tools that the model may call: Python functions (sync or async) with type hints and a Google-style docstring,
            or [`agent_vllm.Tool`]. A row's `tools` column, if there is one, picks from them by name. Instead of a list, a
            function that takes a dataset row and returns the row's own list.
        environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            As in TRL: a function that builds an environment, one per trajectory, or several by the name in a row's
            `environment` column. An environment that fails ends only its own trajectory. Its method
            `get_user_message(messages)`, if there is one, is the simulated user. See `docs/environments.md`.
        user (`Callable`, *optional*):
            A function that takes a dataset row and returns the row's simulated user, or `None`. The user is a function
            (sync or async): it gets the messages, which end with the model's answer, and returns the next user message,
            or `None` to end the conversation.
        agent (`Callable` or `list[str]`, *optional*):
            An agent with a loop of its own, in place of `tools`, `environment_factory` and `user`: a function (sync or
            async) that takes a dataset row and an OpenAI client, or a command. What it returns or prints reaches reward
            functions as `agent_output`. See `docs/agents.md`.
        rollout_engine (`str` or [`agent_vllm.RolloutEngine`], *optional*, defaults to `"vllm"`):
            `"vllm"`, `"vllm-server"` (with `base_urls` in `rollout_engine_kwargs`), `"torch"`, or an engine built by
            you, which you close.
        chat_format ([`agent_vllm.ChatFormat`], *optional*):
            How conversations become ids and back. If `None`, it is built from the tokenizer's chat template.
        redact_rollouts (`Callable`, *optional*):
            With `record_rollouts`: a function that gets each record before it is written and returns the record to write,
            such as [`agent_vllm.record.redact_secrets`].
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
        tools: ToolsArgument = None,
        environment_factory: Factory | dict[str, Factory] | None = None,
        user: UserOfRow | None = None,
        agent: Agent | None = None,
        rollout_engine: str | RolloutEngine = "vllm",
        chat_format: ChatFormat | None = None,
        redact_rollouts: Redact | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = AgentGRPOConfig(f"{name.split('/')[-1]}-AgentGRPO")
        check_arguments(args, model, rollout_engine, kwargs)
        self._check_rows(args, tools, environment_factory, user, train_dataset, eval_dataset, agent)
        super().__init__(
            model,
            reward_funcs=list(reward_funcs) if isinstance(reward_funcs, list) else reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            environment_factory=self._environments.for_trl(),
            **kwargs,
        )
        # Switches on TRL's importance-sampling correction. It is set here because TRL's constructor would
        # start its own vLLM; `checks` repeats the constructor's checks.
        self.use_vllm = args.old_logprobs == "recomputed"
        self._learner_logps = torch.empty(0, 0)  # [B, C] of the latest loss
        self._has_tokens = False  # the coming optimizer step, on this process
        self._start_rollouts(rollout_engine, chat_format, redact_rollouts)
        try:
            self._start_trees(self.rollout_engine.max_model_len)
        except ValueError:
            self.close()
            raise
        self._gap = GapMeter(self._max_mean_gap())
        self._run_checks = RunChecks(
            self.accelerator,
            on_warning=cast(OnWarning, self.args.on_warning),
            reward_names=self.reward_func_names,
            num_generations=self.num_generations,
        )

    def _max_mean_gap(self) -> float:
        if self.args.max_logprob_gap is not None:
            return self.args.max_logprob_gap
        if self.top_p != 1.0 or self.top_k or self.min_p:
            return math.inf  # the engine's logprobs are of what is left of the distribution
        is_mixed = self.accelerator.mixed_precision != "no"
        learner = None if is_mixed else self._unwrapped().dtype
        return max_mean_gap(learner, self.rollout_engine.dtype)

    # ---- TRL's methods, in the order in which TRL calls them ----

    def _generate_and_score_completions(self, inputs: Inputs) -> dict[str, Any]:
        output = self._until_not_lost(inputs, super()._generate_and_score_completions)
        if self.args.old_logprobs == "sampler":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        elif "importance_sampling_ratio" in output:
            for name, value in correction_metrics(output, self.accelerator).items():
                self._metrics[self._mode][name][-1] = value
        output = self._exclude(output)
        learner_logps = output.get("old_per_token_logps") if self.use_vllm else None
        output |= self._write_record(output["advantages"], learner_logps)
        if self.rollout.mode == "train":
            self._run_checks.see(self.rollout)
        return output

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        rollout = self._run_rollout(prompts)
        self._gap.expect(rollout.mode, self.rollout_engine.policy_version)
        fields = to_trl(
            rollout.trajectories,
            pad_token_id(self._tokenizer),
            rollout.exclusions,
            as_text=has_text_prompts(prompts),
        )
        return (
            fields.prompt_ids,
            fields.completion_ids,
            fields.tool_mask,
            fields.completions,
            fields.logprobs,
            rollout.reward_columns,
            None,  # images
            [],  # images in tool results
        )

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        ids = [trajectory.completion_ids for trajectory in self.trajectories]  # without padding
        self.async_loop = shared_loop().loop  # async reward functions may share clients with tools
        return self._score_rollout(super()._calculate_rewards(inputs, prompts, completions, ids))

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, compute_entropy: bool = False, **kwargs: Any
    ) -> Scores:
        is_reference = runs_as_reference(self.model)  # with PEFT it is the learner itself
        scores_old_policy = model is self.model and not compute_entropy and not is_reference
        if scores_old_policy and self.args.old_logprobs == "sampler":
            return None, None, None  # the engine has them: no forward pass
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
            model, *args, compute_entropy=compute_entropy, **kwargs
        )
        if compute_entropy:
            self._learner_logps = cast(torch.Tensor, logps)
        return logps, entropies, aux_loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        mode = self._mode
        lag = self._gap.lag(mode, self.rollout_engine.policy_version)
        self._metrics[mode]["sampling/policy_version_lag"].append(float(lag))
        if lag == 0:  # engine and learner still hold the same weights
            self._measure_gap(mode, inputs)
        if self._gap.is_exceeded(mode):
            # zero gradients rather than none: processes reduce them together
            loss = 0.0 * self._learner_logps.sum()
            if self._record is not None:
                self._record.exclude(mode, inputs["row_number"])
        else:
            self._has_tokens |= bool(_loss_mask(inputs).any())
        self._learner_logps = self._learner_logps.detach()
        return loss

    def _measure_gap(self, mode: str, inputs: dict[str, Any]) -> None:
        was_exceeded = self._gap.is_exceeded(mode)
        learner_logps = self._learner_logps.detach()
        gap = self._gap.measure(
            mode,
            inputs["sampling_per_token_logps"],
            learner_logps,
            _loss_mask(inputs),
            self.accelerator,
        )
        self._append_metrics(mode, gap.metrics)
        if self._record is not None:
            self._record.amend(mode, inputs["row_number"], learner_logps)
        if self._gap.is_exceeded(mode) and not was_exceeded:
            self._exclude_rest(mode, gap)

    def _exclude_rest(self, mode: str, gap: Gap) -> None:
        """Move what is left of the rollout from trained to mismatched in the token ledger, and warn."""
        self.rollout.mismatch()
        trained, mismatched = (
            self._metrics[mode][f"rollout/{name}_tokens"]
            for name in ("trained", Exclusion.MISMATCHED)
        )
        num_trained = float(self._gap.num_accepted(mode))
        mismatched[-1], trained[-1] = trained[-1] - num_trained, num_trained
        warning = gap_warning(gap, self._gap, self.rollout_engine.policy_version)
        self._run_checks.report(warning)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self._skip_empty_step()
        return loss

    def _skip_empty_step(self) -> None:
        """
        Drop the gradients of a step in which no process trained a token.

        They are zero, and momentum and weight decay would move the weights all the same.
        """
        is_empty = not any(gather_flags(self.accelerator, self._has_tokens)[0])
        self._has_tokens = False
        if (
            is_empty and self.accelerator.scaler is None
        ):  # a scaler refuses a step without gradients
            self.model.zero_grad(set_to_none=True)


def _loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    return inputs["completion_mask"] * inputs["tool_mask"]  # [B, C]
