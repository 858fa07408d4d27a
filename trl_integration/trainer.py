"""AgentGRPOTrainer: TRL's GRPO trainer with rollouts by an `agent_vllm` engine.

Owns when weights go to the engine, what a rollout is made of, and how trajectories reach TRL's own
code, which does the rest: rewards, advantages, loss, logging, saving. Invariant: every rollout is
sampled with the learner's current weights.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from agent_vllm.chat import ChatFormat
from agent_vllm.engines import RolloutEngine
from agent_vllm.engines.learner import runs_as_reference
from agent_vllm.environments import Factory, user_suffix_ids
from agent_vllm.inspect import RolloutProgress
from agent_vllm.record import Redact
from agent_vllm.rollout import rollout_batch
from agent_vllm.status import RolloutStatus
from agent_vllm.tools import Tool, select_tools, tool_name, tools_by_name
from agent_vllm.types import Trajectory
from trl_integration.checks import check_arguments, check_datasets, check_setup
from trl_integration.config import AgentGRPOConfig
from trl_integration.engine_life import EngineLife, RolloutLost, SyncAfterSteps
from trl_integration.environments import RowEnvironments, UserOfRow
from trl_integration.fields import reward_columns, to_trl
from trl_integration.interrupts import interrupted_afterwards
from trl_integration.ledger import Exclusion, exclusion, token_ledger
from trl_integration.metrics import (
    GapMeter,
    correction_metrics,
    ledger_metrics,
    rollout_metrics,
)
from trl_integration.recording import RecordedRollout, TrainingRecord

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
            As there. Prompts must be conversational. `rollout_func` is refused.
        args ([`AgentGRPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        tools (`list` or `Callable`, *optional*):
            What the model may call: Python functions (sync or async) with type hints and a Google-style docstring, or
            [`agent_vllm.Tool`]. A row's `tools` column, if there is one, picks from them by name. Instead of a list, a
            function that takes a dataset row and returns the row's own list.
        environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            As in TRL: what makes an environment, one for each trajectory, or several by the name in a row's `environment`
            column. One that fails ends its own trajectory. Its method `get_user_message(messages)`, if there is one, is
            the simulated user. See `docs/environments.md`.
        user (`Callable`, *optional*):
            A function from a dataset row to the row's simulated user, or to `None`. The user is a function (sync or
            async): it gets the messages, which end with the model's answer, and returns the next user message, or
            `None` where there is nothing more to say.
        rollout_engine (`str` or [`agent_vllm.RolloutEngine`], *optional*, defaults to `"vllm"`):
            `"vllm"`, `"vllm-server"` (with `base_urls` in `rollout_engine_kwargs`), `"torch"`, or an engine built by
            you, which you close.
        chat_format ([`agent_vllm.ChatFormat`], *optional*):
            How conversations become ids and back. If `None`, it is made from the tokenizer's chat template.
        redact_rollouts (`Callable`, *optional*):
            With `record_rollouts`: gets each record before it is written and returns what is written instead, such as
            [`agent_vllm.record.redact_secrets`].
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
        environment_factory: Factory | dict[str, Factory] | None = None,
        user: UserOfRow | None = None,
        rollout_engine: str | RolloutEngine = "vllm",
        chat_format: ChatFormat | None = None,
        redact_rollouts: Redact | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = AgentGRPOConfig(f"{name.split('/')[-1]}-AgentGRPO")
        check_arguments(args, model, rollout_engine, kwargs)
        self._tools_of_row = tools if callable(tools) else None
        self._tools = {} if callable(tools) else tools_by_name(tools)
        needs_prompt = environment_factory is None
        datasets = check_datasets(train_dataset, eval_dataset, needs_prompt=needs_prompt)
        self._environments = RowEnvironments(environment_factory, user, args)
        self._environments.check(list(self._tools), datasets)
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
        check_setup(self)
        self.reward_funcs = self._environments.isolated(self.reward_funcs)
        self.environment_factories = None  # TRL's own handling lets one environment end them all
        self.chat_format = chat_format or ChatFormat.from_tokenizer(
            self._tokenizer,
            eos_token_ids=self.eos_token_ids,
            template_kwargs=self.chat_template_kwargs,
            needs_tools=bool(self._tools or self._tools_of_row or self._environments),
            escape_tool_results=self.args.escape_tool_results,
        )
        if self._environments.have_users:
            user_suffix_ids(self.chat_format, "Hello.")  # refuses templates that can't be used so
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
            save_state=self._save_state,
        )
        self._gap = GapMeter()
        self._rollouts_at: dict[tuple[str, int], int] = {}  # how many at this mode and step
        self._record = None
        if args.record_rollouts:
            rank = self.accelerator.process_index
            self._record = TrainingRecord(args.output_dir, rank, self._tokenizer, redact_rollouts)
        self.add_callback(
            SyncAfterSteps(
                self.engine_life.learner_changed,
                lambda: self._append_metrics("train", self.engine_life.after_step()),
            )
        )

    def close(self) -> None:
        """Close the engine that this trainer built, the environments and the record."""
        self.engine_life.close()
        self._environments.close()
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
        with interrupted_afterwards():  # a run can't be resumed from half a checkpoint
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

    def _save_state(self) -> str | None:
        """Saves a checkpoint where the steps have theirs; its folder, None outside of training."""
        if not self.is_in_train:
            return None
        self._save_checkpoint(self.model, trial=None)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        return os.path.join(self.args.output_dir, name)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not self.is_in_train:  # nothing tells when weights change outside of training
            self.engine_life.learner_changed()
        return super().evaluate(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.args.device.type == "cpu":
            # accelerate numbers the CPUs of several ranks, and torch can't load to "cpu:1"
            vars(self.args)["_setup_devices"] = torch.device("cpu")
        super()._load_optimizer_and_scheduler(checkpoint)

    # ---- rollouts, in the order in which TRL calls these ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows = [dict(row) for row in inputs]  # without what TRL adds
        output = None
        while output is None:
            with contextlib.suppress(RolloutLost):
                output = self._try_to_generate(inputs)
        if self.args.old_logprobs == "sampler":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        elif "importance_sampling_ratio" in output:
            for name, value in correction_metrics(output, self.accelerator).items():
                self._metrics[self._mode][name][-1] = value
        trained = self._leave_out(output)
        if self._record is not None:
            learner = output.get("old_per_token_logps") if self.use_vllm else None
            output["row_number"] = self._record.write(
                self._recorded_rollout(output["advantages"], trained), learner
            )
        return output

    def _try_to_generate(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's part, with environments that are reset for each try."""
        self.environments = None  # TRL would reset them
        self._environments.start(self._rows, self.chat_format)
        rows = zip(inputs, self._environments.prompts(), strict=True)
        # new rows: TRL adds columns, and samplers repeat row objects
        return super()._generate_and_score_completions([row | prompt for row, prompt in rows])

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
        if self.engine_life.is_lost(self.trajectories):
            self._give_up_rollout()
        self.engine_life.rollout_done()
        self.trajectories, scores = self._environments.score(self.trajectories)
        self.environments = self._environments.instances  # for reward functions
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
            {**reward_columns(self.trajectories), **scores},
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
                users_batch=[self._environments.user(index) for index in range(len(prompts))],
                failed_batch=self._environments.errors,
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
        self._rollout_s, self._num_retries = status.elapsed_s, status.num_retries
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
        is_reference = runs_as_reference(self.model)  # with PEFT it is the learner itself
        scores_old_policy = model is self.model and not compute_entropy and not is_reference
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
        return tools + self._environments.tools(index)

    def _rollout_seed(self, mode: str) -> int:
        """Differs by rank, step and rollout; a resumed run goes on with the seeds it would have had."""
        key = (mode, self.state.global_step)
        self._rollouts_at = {key: self._rollouts_at.get(key, -1) + 1}
        text = f"{self.args.seed}/{self.accelerator.process_index}/{key}/{self._rollouts_at[key]}"
        return random.Random(text).getrandbits(63)

    def _give_up_rollout(self) -> None:
        """Nothing came of it: it goes into the record, and its seed to the next try."""
        num_rows = len(self.trajectories)
        if self._record is not None:
            self._rewards = torch.full((num_rows, len(self.reward_func_names)), torch.nan)
            nothing = torch.zeros(num_rows)
            self._record.write(self._recorded_rollout(nothing, [False] * num_rows))
        self._rollouts_at = {key: number - 1 for key, number in self._rollouts_at.items()}
        raise RolloutLost

    def _log_rollout(self, mode: str) -> None:
        metrics, num_tokens = rollout_metrics(
            self.trajectories,
            seconds=self._rollout_s,
            stats=self._engine_stats,
            num_retries=self._num_retries,
        )
        metrics["engine/rebuilds"] = float(self.engine_life.num_rebuilds)
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
