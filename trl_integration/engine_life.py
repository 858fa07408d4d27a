"""The rollout engine through a training run: built from the learner, kept on its weights, closed.

Owns when weights go to the engine. Invariant: `ensure_current` leaves the engine on the learner's
current weights.
"""

import time
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from agent_vllm.engines import RolloutEngine, create_rollout_engine
from trl_integration.config import AgentGRPOConfig


class EngineLife:
    """One engine and the learner that it samples for.

    Args:
        engine: the name of the engine that is built here, or an engine that the caller closes.
        learner: the model as it is now, without accelerate's wrappers.

    Attributes:
        sync_seconds: what the syncs so far took together.
    """

    def __init__(
        self,
        engine: str | RolloutEngine,
        *,
        args: AgentGRPOConfig,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        learner: Callable[[], PreTrainedModel],
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._tokenizer = tokenizer
        self._learner = learner
        self._is_ours = isinstance(engine, str)
        self._is_current = False
        self._is_asleep = False
        self.sync_seconds = 0.0
        self.engine = self._build(engine) if isinstance(engine, str) else engine

    def sync(self) -> dict[str, float]:
        """Give the engine the learner's current weights; returns metrics.

        An engine that sleeps is left asleep and gets them when it is needed: they would take the
        memory that the learner is using.
        """
        if self._is_asleep:
            self.engine.policy_version += 1
            return {}
        return self._load()

    def _load(self) -> dict[str, float]:
        start_s = time.perf_counter()
        self.engine.update_policy(self._learner())
        self._is_current, self._is_asleep = True, False
        seconds = time.perf_counter() - start_s
        self.sync_seconds += seconds
        num_bytes = self.engine.num_synced_bytes
        return {"rollout/sync_seconds": seconds, "rollout/sync_bytes": float(num_bytes)}

    def ensure_current(self) -> dict[str, float]:
        """Sync if the learner may have changed since the last time; returns metrics."""
        return {} if self._is_current else self._load()

    def rollout_done(self) -> None:
        """Before the learner's forward pass: a sleeping engine's memory is the learner's."""
        if self._args.vllm_enable_sleep_mode:
            self.engine.sleep()
            self._is_current, self._is_asleep = False, True

    def learner_changed(self) -> None:
        """The learner's weights are not the engine's any more, or nobody knows."""
        self._is_current = False

    def close(self) -> None:
        """Close the engine if it was built here."""
        if self._is_ours:
            self.engine.close()

    def _build(self, name: str) -> RolloutEngine:
        options: dict[str, Any] = {"seed": self._args.seed + self._accelerator.process_index}
        if self._args.vllm_max_model_length is not None:
            options["max_model_len"] = self._args.vllm_max_model_length
        if name == "vllm":
            options["gpu_memory_utilization"] = self._args.vllm_gpu_memory_utilization
            options["sleep_mode"] = self._args.vllm_enable_sleep_mode
        options |= self._args.rollout_engine_kwargs or {}
        return create_rollout_engine(name, self._learner(), self._tokenizer, **options)


class SyncAfterSteps(TrainerCallback):
    """After every optimizer step the learner's weights go to the engine.

    Args:
        learner_changed: called when training begins.
        sync: called after each step.
    """

    def __init__(self, learner_changed: Callable[[], Any], sync: Callable[[], Any]) -> None:
        self._learner_changed = learner_changed
        self._sync = sync

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._learner_changed()  # a checkpoint may just have been loaded

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._sync()
