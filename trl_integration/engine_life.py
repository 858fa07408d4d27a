"""Keep a rollout engine through a training run: build it from the learner, sync, replace and close it.

Owns when weights are synced to the engine, what a failed sync means, and what a dead engine means for
the run. Invariant: `ensure_current` leaves a live engine on the learner's current weights, or ends the
run. Processes decide together, before and after a rollout, so that none waits for another that has
stopped.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from agent_vllm.engines import RolloutEngine, create_rollout_engine
from agent_vllm.errors import EngineDeadError, LearnerDivergedError
from agent_vllm.types import StopReason, Trajectory
from trl_integration.config import AgentGRPOConfig
from trl_integration.processes import gather_flags

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MAX_NUM_SEQS = 1024  # vLLM's own default for large GPUs
_MAX_REBUILDS_IN_A_ROW = 3  # in a row: no rollout in between left all engines alive


class RolloutLost(Exception):
    """The engines failed every trajectory; the rollout is retried once there is a live one."""


class EngineLife:
    """
    One engine and the learner that it samples for.

    Args:
        engine: the name of the engine that is built here, or an engine that the caller closes.
        learner: returns the current model, without accelerate's wrappers.
        check_learner: raises if the model's weights are not finite.
        save_state: saves a checkpoint and returns its folder; None where there is nothing to save.

    Attributes:
        sync_seconds: seconds that all syncs so far took.
        num_rebuilds: engines that were built in place of a dead one.
    """

    def __init__(
        self,
        engine: str | RolloutEngine,
        *,
        args: AgentGRPOConfig,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        learner: Callable[[], PreTrainedModel],
        check_learner: Callable[[], None],
        save_state: Callable[[], str | None],
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._tokenizer = tokenizer
        self._learner = learner
        self._check_learner = check_learner
        self._save_state = save_state
        self._name = engine if isinstance(engine, str) else None
        self._is_current = False
        self._verdict: str | None = None  # why the engine counts as dead, whatever it reports
        self._was_synced = False
        self._sync_error: Exception | None = None  # of the latest sync, if it failed
        self._num_rebuilds_in_a_row = 0
        self.num_rebuilds = 0
        self.sync_seconds = 0.0
        self.engine = self._build(engine) if isinstance(engine, str) else engine
        self._let_sleep()  # while the learner first allocates

    def sync(self) -> dict[str, float]:
        """
        Sync the learner's current weights to the engine; return metrics. A sleeping engine wakes up.

        Raises:
            EngineDeadError: the engine is dead.
            LearnerDivergedError: the weights are not finite.
        """
        self._is_current = False
        self._check_learner()
        start_s = time.perf_counter()
        self.engine.update_policy(self._learner())
        self._note_current()
        seconds = time.perf_counter() - start_s
        self.sync_seconds += seconds
        num_bytes = self.engine.num_synced_bytes
        return {"rollout/sync_seconds": seconds, "rollout/sync_bytes": float(num_bytes)}

    def _note_current(self) -> None:
        self._is_current = self._was_synced = True
        self._sync_error = None

    def _try_to_load(self) -> dict[str, float]:
        """
        Sync, and return metrics. The first failure is retried before the next rollout; the second in a row is a death.

        Raises:
            Exception: the run's first sync failed, so its set-up is wrong.
        """
        try:
            return self.sync()
        except LearnerDivergedError:
            raise
        except Exception as error:
            if not self._was_synced and not isinstance(error, EngineDeadError):
                raise
            told = f"{type(error).__name__}: {error}"
            if self._sync_error is not None or isinstance(error, EngineDeadError):
                self._verdict = f"the weights could not be synced, in the end with {told}"
            else:
                self._accelerator.print(
                    f"Warning: a weight sync failed ({told}). It is retried before the next rollout."
                )
            self._sync_error = error
            return {}

    def after_step(self) -> dict[str, float]:
        """
        Sync after an optimizer step, and return metrics. What fails is left to `ensure_current`.

        An engine that sleeps between rollouts stays asleep: weights would take memory that the learner uses.
        """
        self._is_current = False
        metrics = {}
        is_due = self._args.sync_weights == "after_step" and not self._args.vllm_enable_sleep_mode
        if is_due and not self._is_dead_anywhere():
            metrics = self._try_to_load()
        if not self._is_current:
            self.engine.advance_policy_version()  # as of the weights that it will hold
        return metrics

    def ensure_current(self) -> dict[str, float]:
        """
        Before a rollout, make sure of a live engine, and sync it if the learner may have changed.

        Returns:
            Metrics.

        Raises:
            EngineDeadError: the engine is dead and must not be replaced; says where the state is saved.
        """
        metrics: dict[str, float] = {}
        while True:
            dead, stale = gather_flags(
                self._accelerator, self._death is not None, not self._is_current
            )
            if any(dead):
                self._replace()
            elif any(stale):
                metrics = self._try_to_load()
            else:
                return metrics

    def rollout_done(self) -> None:
        """Let the engine sleep, if it is set to, before the learner's forward pass needs the memory."""
        self._let_sleep()

    def _let_sleep(self) -> None:
        if self._args.vllm_enable_sleep_mode and self._death is None:
            self.engine.sleep()
            self._is_current = False

    def is_lost(self, trajectories: Sequence[Trajectory]) -> bool:
        """
        Return whether the engines failed every trajectory of all processes.

        An engine that failed all of its own counts as dead, whatever it reports.
        """
        begun = [t for t in trajectories if t.stop_reason is not StopReason.ENVIRONMENT_ERROR]
        errors = [t.error for t in begun if t.stop_reason is StopReason.ENGINE_ERROR]
        if errors and len(errors) == len(begun):
            self._verdict = f"it failed all {len(errors)} trajectories, the first with: {errors[0]}"
        dead, some_failed, none_answered = gather_flags(
            self._accelerator, self._death is not None, bool(errors), len(errors) == len(begun)
        )
        if not any(dead):
            self._num_rebuilds_in_a_row = 0
        return any(some_failed) and all(none_answered)

    def learner_changed(self, num_steps: int = 0) -> None:
        """
        Note that the engine may not have the learner's weights any more.

        Args:
            num_steps: optimizer steps made so far. The versions of a resumed run go on from there.
        """
        self._is_current = False
        self.engine.advance_policy_version(to_at_least=num_steps)

    def close(self) -> None:
        """Close the engine if it was built here."""
        if self._name is not None:
            self.engine.close()

    # ---- death ----

    @property
    def _death(self) -> str | None:
        return self._verdict or self.engine.death

    def _is_dead_anywhere(self) -> bool:
        return any(gather_flags(self._accelerator, self._death is not None)[0])

    def _replace(self) -> None:
        """Rebuild the engine on all processes: only together can they gather a sharded learner's weights."""
        self._check_learner()  # no engine can sample from NaN
        death = self._death or "it lives, but not those of all other processes"
        if self._name is None or self._args.on_engine_death == "stop":
            self._stop(death)
        if self._num_rebuilds_in_a_row == _MAX_REBUILDS_IN_A_ROW:
            self._stop(death, f"It was rebuilt {_MAX_REBUILDS_IN_A_ROW} times in a row")
        self._num_rebuilds_in_a_row += 1
        self.num_rebuilds += 1
        self._accelerator.print(
            f"Warning: the rollout engine is dead ({death}); building a new one."
        )
        failure = self._rebuild(self._name)
        if any(gather_flags(self._accelerator, failure is not None)[0]):
            self._stop(death, f"A new one could not be built: {failure}")

    def _rebuild(self, name: str) -> str | None:
        """Put a new engine in place of the old one; return what went wrong, or None."""
        version = self.engine.policy_version
        try:
            self.engine.close()
        except Exception as error:  # what killed it may also break its `close`
            self._accelerator.print(f"Warning: the dead engine did not close: {error}")
        try:
            self.engine = self._build(name)
            self.engine.update_policy(self._learner())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self.engine.advance_policy_version(to_at_least=version)
        self._verdict = None
        self._note_current()
        return None

    def _stop(self, *reasons: str) -> NoReturn:
        folder = self._save_state()
        told = "".join(f"{reason.removesuffix('.')}. " for reason in reasons)
        if folder is not None:
            told += (
                "The run's state is saved: go on in a new process with "
                f"`trainer.train(resume_from_checkpoint={folder!r})`."
            )
        raise EngineDeadError(f"The rollout engine is dead: {told.strip()}") from self._sync_error

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the learner's matrix products on a GPU, if it is not that of its weights.

        On a CPU an engine keeps the dtype of the weights, so that its logprobs can be compared exactly.
        """
        is_gpu = self._accelerator.device.type == "cuda"
        return _AUTOCAST.get(self._accelerator.mixed_precision) if is_gpu else None

    def _build(self, name: str) -> RolloutEngine:
        options: dict[str, Any] = {"seed": self._args.seed + self._accelerator.process_index}
        if self._args.vllm_max_model_length is not None:
            options["max_model_len"] = self._args.vllm_max_model_length
        if name == "vllm":
            options["dtype"] = self._autocast_dtype
            options["max_num_seqs"] = min(_num_rows(self._args), _MAX_NUM_SEQS)
            options["gpu_memory_utilization"] = self._args.vllm_gpu_memory_utilization
            options["sleep_mode"] = self._args.vllm_enable_sleep_mode
        # `TrainingArguments` has parsed a string
        options |= cast(dict[str, Any], self._args.rollout_engine_kwargs or {})
        return create_rollout_engine(name, self._learner(), self._tokenizer, **options)


def _num_rows(args: AgentGRPOConfig) -> int:
    """Return the trajectories of a process's largest rollout."""
    per_rollout = args.per_device_train_batch_size * cast(int, args.steps_per_generation)
    return max(per_rollout, args.per_device_eval_batch_size)


class SyncAfterSteps(TrainerCallback):
    """
    Sync the learner's weights to the engine after every optimizer step.

    Args:
        learner_changed: called when training begins, with the steps made so far.
        after_step: called after each step.
    """

    def __init__(
        self, learner_changed: Callable[[int], Any], after_step: Callable[[], Any]
    ) -> None:
        self._learner_changed = learner_changed
        self._after_step = after_step

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        self._learner_changed(state.global_step)  # a checkpoint may just have been loaded

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._after_step()
