"""The rollout engine through a training run: built from the learner, kept on its weights, closed.

Owns when weights go to the engine. Invariant: `ensure_current` leaves the engine on the learner's
current weights.
"""

import time
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

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
        self.sync_seconds = 0.0
        self.engine = self._build(engine) if isinstance(engine, str) else engine

    def sync(self) -> dict[str, float]:
        """Give the engine the learner's current weights; returns metrics."""
        start_s = time.perf_counter()
        self.engine.update_policy(self._learner())
        self._is_current = True
        seconds = time.perf_counter() - start_s
        self.sync_seconds += seconds
        num_bytes = self.engine.num_synced_bytes
        return {"rollout/sync_seconds": seconds, "rollout/sync_bytes": float(num_bytes)}

    def ensure_current(self) -> dict[str, float]:
        """Sync if the learner may have changed since the last time; returns metrics."""
        return {} if self._is_current else self.sync()

    def learner_changed(self, num_steps: int = 0) -> None:
        """The learner's weights are not the engine's any more, or nobody knows.

        Args:
            num_steps: that the learner has made. Versions of a resumed run go on from there.
        """
        self._is_current = False
        self.engine.policy_version = max(self.engine.policy_version, num_steps)

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
        options |= self._args.rollout_engine_kwargs or {}
        return create_rollout_engine(name, self._learner(), self._tokenizer, **options)


class SyncAfterSteps(TrainerCallback):
    """After every optimizer step the learner's weights go to the engine.

    Args:
        learner_changed: called when training begins, with the steps made so far.
        sync: called after each step.
    """

    def __init__(self, learner_changed: Callable[[int], Any], sync: Callable[[], Any]) -> None:
        self._learner_changed = learner_changed
        self._sync = sync

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        self._learner_changed(state.global_step)  # a checkpoint may just have been loaded

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._sync()
