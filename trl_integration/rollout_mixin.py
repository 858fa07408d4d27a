"""Run the rollouts of any on-policy TRL trainer with an `agent_vllm` engine.

Owns the life of a [`TrainingRollout`]: begun from TRL's rows, sampled, scored, recorded, and taken out of
the loss's mask where it must not be trained. The trainer that it is mixed into says where in TRL's
code each of these happens. Invariant: every rollout is sampled with the learner's current weights.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from agent_vllm.chat import ChatFormat
from agent_vllm.engines import RolloutEngine
from agent_vllm.environments import Factory
from agent_vllm.environments.user import user_suffix_ids
from agent_vllm.gateway import Agent, rollout_agent
from agent_vllm.inspect import RolloutProgress
from agent_vllm.record import Redact
from agent_vllm.rollout import RolloutStatus, rollout_batch
from agent_vllm.types import Trajectory
from trl_integration.agents import check_agent_arguments, output_column
from trl_integration.checks import (
    check_batch_can_be_filled,
    check_datasets,
    check_overrides,
    check_prompt,
    check_setup,
)
from trl_integration.config import AgentGRPOConfig
from trl_integration.engine_life import RolloutLost
from trl_integration.engine_mixin import EngineMixin
from trl_integration.environments import Row, RowEnvironments, RowTools, ToolFunctions, UserOfRow
from trl_integration.fields import token_ledger
from trl_integration.metrics import ledger_metrics, rollout_metrics
from trl_integration.processes import gather
from trl_integration.prompts import conversations, own_format
from trl_integration.recording import RecordedRollout, TrainingRecord
from trl_integration.rewards import isolated_rewards, reward_columns
from trl_integration.training_rollout import RolloutSeeds, TrainingRollout

ToolsArgument = ToolFunctions | Callable[[Row], ToolFunctions] | None
Inputs = list[dict[str, Any]]


class RolloutMixin(EngineMixin):
    """
    The rollouts of a TRL trainer.

    Attributes:
        rollout ([`TrainingRollout`]): the latest one on this process; empty before the first.
        chat_format ([`agent_vllm.ChatFormat`]): how conversations become ids and back.
    """

    rollout: TrainingRollout
    chat_format: ChatFormat
    # of TRL's trainers
    chat_template_kwargs: dict[str, Any]
    environment_factories: dict[str | None, Factory] | None
    environments: list[Any] | None
    eos_token_ids: list[int]
    mask_truncated_completions: bool
    min_p: float | None
    num_generations: int
    num_generations_eval: int
    reward_func_names: list[str]
    reward_funcs: list[Any]
    temperature: float
    top_k: int
    top_p: float
    tools: list[Any]

    # ---- set-up ----

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    def _check_rows(
        self,
        args: AgentGRPOConfig,
        tools: ToolsArgument,
        environment_factory: Factory | dict[str, Factory] | None,
        user: UserOfRow | None,
        train_dataset: Any,
        eval_dataset: Any,
        agent: Agent | None = None,
    ) -> None:
        """Set up what rows bring to their trajectories, before TRL's constructor."""
        self._agent = agent
        if agent is not None:
            replaced = {"tools": tools, "environment_factory": environment_factory, "user": user}
            check_agent_arguments(agent, args, **replaced)
        self._row_tools = RowTools(tools)
        self._environments = RowEnvironments(environment_factory, user, args)
        datasets = check_datasets(
            train_dataset,
            eval_dataset,
            needs_prompt=not self._environments,
            takes_text=self._is_one_answer,
        )
        self._environments.check(self._row_tools.names, datasets)

    def _start_rollouts(
        self,
        engine: str | RolloutEngine,
        chat_format: ChatFormat | None,
        redact: Redact | None,
    ) -> None:
        """Set up what rollouts need, after TRL's constructor."""
        check_setup(self)
        self.reward_funcs = isolated_rewards(self.reward_funcs, self._environments.reward_types)
        self.tools = [*self._row_tools.functions, *self.tools]  # before those of environments
        self.environment_factories = None  # TRL's handling lets one environment end all of them
        # TRL judges truncation by the last token; here the stop reason does, in `TrainingRollout`.
        self.mask_truncated_completions = False
        self.chat_format = chat_format or own_format(
            self._tokenizer,
            self.eos_token_ids,
            is_one_answer=self._is_one_answer,
            needs_tools=self._offers_tools,
            template_kwargs=self.chat_template_kwargs,
            escape_tool_results=self.args.escape_tool_results,
        )
        if tools := [*self._row_tools.of_all, *self._environments.example_tools]:
            self.chat_format.check_tools(tools)
        if self._environments.have_users:
            user_suffix_ids(self.chat_format, "Hello.")  # refuses templates that can't be used so
        self._start_engine(engine)
        self._rollout_seconds = 0.0
        self.rollout = TrainingRollout.empty()
        rank = self.accelerator.process_index
        self._seeds = RolloutSeeds(self.args.seed, rank)
        self._record = None
        if self.args.record_rollouts:
            self._record = TrainingRecord(self._output_dir, rank, self._tokenizer, redact)

    @property
    def _offers_tools(self) -> bool:
        return bool(self._row_tools or self._environments or self._agent is not None)

    @property
    def _is_one_answer(self) -> bool:
        """Whether nothing but one completion of the model follows any prompt."""
        return not self._offers_tools and not self._environments.have_users

    def close(self) -> None:
        """Close the engine that this trainer built, the environments and the record."""
        self.engine_life.close()
        self._environments.close()
        if self._record is not None:
            self._record.close()

    def get_train_dataloader(self) -> Any:
        batch_size = cast(int, self.args.generation_batch_size)  # set by TRL's config
        check_batch_can_be_filled(self.train_dataset, batch_size, self.num_generations)
        return super().get_train_dataloader()

    @property
    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of the latest rollout on this process."""
        return self.rollout.trajectories

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds that all rollouts and weight syncs so far took."""
        return {"rollout": self._rollout_seconds, "sync": self.engine_life.sync_seconds}

    # ---- one rollout, in the order in which TRL's methods call these ----

    def _until_not_lost(
        self, inputs: Inputs, generate: Callable[[Inputs], dict[str, Any]]
    ) -> dict[str, Any]:
        """
        Call TRL's `generate`, again for as long as the engine loses the rollout.

        Args:
            inputs: the dataset's rows, without what TRL adds.
        """
        while True:
            self.rollout = self._begin_rollout([dict(row) for row in inputs])
            rows = zip(inputs, self._environments.prompts(), strict=True)
            with contextlib.suppress(RolloutLost):
                # new rows: TRL adds columns, and samplers repeat row objects
                return generate([row | prompt for row, prompt in rows])

    def _begin_rollout(self, rows: Inputs) -> TrainingRollout:
        self.environments = None  # TRL would reset them
        for index, row in enumerate(rows):  # of streams and of `evaluate`, which nobody has checked
            check_prompt(
                row.get("prompt"),
                f"Row {index} of the batch",
                needs_prompt=not self._environments,
                takes_text=self._is_one_answer,
            )
        self._environments.start(rows, self.chat_format)
        return TrainingRollout(
            mode=self._mode,
            step=self.state.global_step,
            seed=self._seeds.next(self._mode, self.state.global_step),
            rows=rows,
            tools=[
                [*self._row_tools.of(row), *self._environments.tools(index)]
                for index, row in enumerate(rows)
            ],
            rewards=torch.full((len(rows), len(self.reward_func_names)), torch.nan),
        )

    def _run_rollout(self, prompts: list[Any]) -> TrainingRollout:
        """
        Sample the rollout that has begun, and let the environments score it.

        Raises:
            RolloutLost: the engines failed every trajectory.
        """
        self._append_metrics("train", self.engine_life.ensure_current())
        rollout, mask_truncated = self.rollout, self.args.mask_truncated_completions
        rollout.finish(self._sample(rollout, prompts), mask_truncated=mask_truncated)
        if self.engine_life.is_lost(rollout.trajectories):
            self._give_up_rollout()
        self.engine_life.rollout_done()
        trajectories, scores = self._environments.score(rollout.trajectories)
        rollout.finish(trajectories, mask_truncated=mask_truncated)
        rollout.reward_columns = {**reward_columns(trajectories), **scores}
        if self._agent is not None:
            rollout.reward_columns |= output_column(trajectories)
        self.environments = self._environments.instances  # for reward functions
        self._log_rollout(rollout)
        return rollout

    def _sample(self, rollout: TrainingRollout, prompts: list[Any]) -> list[Trajectory]:
        status = RolloutStatus()
        rollout.started = time.time()
        stats_before = self.rollout_engine.stats()
        run = self._rollout_function(rollout, prompts)
        is_shown = self.args.rollout_progress and self.accelerator.is_main_process
        title = f"{rollout.mode} rollout at step {rollout.step}"
        with RolloutProgress(status, title, enabled=is_shown and not self.args.disable_tqdm):
            trajectories = run(
                limits=self.args.limits(),
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k or 0,
                min_p=self.min_p or 0.0,
                stop_strings=self.args.stop_strings or (),
                thinking_ratio=self.args.thinking_ratio,
                seed=rollout.seed,
                status=status,
            )
        rollout.seconds, rollout.num_retries = status.elapsed_s, status.num_retries
        self._rollout_seconds += rollout.seconds
        stats = self.rollout_engine.stats()
        rollout.engine_stats = stats and stats_before and stats.since(stats_before)
        return trajectories

    def _rollout_function(
        self, rollout: TrainingRollout, prompts: list[Any]
    ) -> Callable[..., list[Trajectory]]:
        """Return what samples the rows, by our loop or by the agent's; takes what both share."""
        engine = self.rollout_engine
        if self._agent is not None:
            return functools.partial(
                rollout_agent, engine, self.chat_format, self._agent, rollout.rows
            )
        chat, messages = conversations(prompts, self.chat_format, self.eos_token_ids)
        return functools.partial(
            rollout_batch,
            engine,
            chat,
            messages,
            rollout.tools,
            users_batch=[self._environments.user(index) for index in range(len(prompts))],
            failed_batch=self._environments.errors,
        )

    def _give_up_rollout(self) -> None:
        """Record a lost rollout, give its seed to the next try, and raise `RolloutLost`."""
        self._write_record(torch.zeros(len(self.rollout.rows)))
        self._seeds.give_back()
        raise RolloutLost

    def _log_rollout(self, rollout: TrainingRollout) -> None:
        metrics, num_tokens = rollout_metrics(
            rollout.trajectories,
            seconds=rollout.seconds,
            stats=rollout.engine_stats,
            num_retries=rollout.num_retries,
        )
        metrics["engine/rebuilds"] = float(self.engine_life.num_rebuilds)
        if rollout.mode == "train":
            self.state.num_input_tokens_seen += num_tokens
        self._metrics[rollout.mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        self._append_metrics(rollout.mode, metrics)

    def _score_rollout(self, rewards: torch.Tensor) -> torch.Tensor:
        """Take in TRL's rewards `[B of all processes, F]`; return them with NaN for failed rows."""
        rollout = self.rollout
        is_failed = torch.tensor(rollout.is_failed, device=rewards.device)
        # half a trajectory must not move its group's baseline
        rewards[gather(self.accelerator, is_failed)] = torch.nan
        first = self.accelerator.process_index * len(rollout.rows)
        rollout.score(rewards[first : first + len(rollout.rows)])
        return rewards

    def _exclude(self, output: Mapping[str, Any]) -> dict[str, Any]:
        """Take excluded trajectories out of the loss's mask of TRL's `output`, and log the token ledger."""
        rollout = self.rollout
        mask = output["completion_mask"]
        mask = mask * torch.tensor(rollout.is_trained, device=mask.device).long()[:, None]
        num_trained = (mask * output["tool_mask"]).sum()
        ledger = token_ledger(rollout.trajectories, rollout.exclusions, int(num_trained))
        num_items = gather(self.accelerator, num_trained).sum()
        self._append_metrics(rollout.mode, ledger_metrics(ledger, self.accelerator))
        return {**output, "completion_mask": mask, "num_items_in_batch": num_items}

    def _write_record(
        self, advantages: torch.Tensor, learner_logprobs: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """
        Record the rollout, if the run is recorded.

        Returns:
            `dict[str, torch.Tensor]`: `row_number`, for TRL to carry to the loss; empty without a record.
        """
        if self._record is None:
            return {}
        is_training = self.rollout.mode == "train"
        recorded = RecordedRollout.of(
            self.rollout,
            reward_names=self.reward_func_names,
            advantages=advantages.tolist(),
            rank=self.accelerator.process_index,
            num_generations=self.num_generations if is_training else self.num_generations_eval,
            num_processes=self.accelerator.num_processes,
            temperature=self.temperature,
            max_model_len=self.rollout_engine.max_model_len,
        )
        return {"row_number": self._record.write(recorded, learner_logprobs)}
