"""Keep a TRL trainer's rollout engine on its model's weights.

Owns the methods of [`~transformers.Trainer`] at which weights change or are saved. Invariant: after
an optimizer step, before training and before an evaluation, the engine is synced or marked stale. A
learner that is not finite is neither stepped, synced nor saved.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from agent_vllm.engines import RolloutEngine
from agent_vllm.errors import LearnerDivergedError
from trl_integration.checkpoints import WholeCheckpoints
from trl_integration.config import AgentGRPOConfig
from trl_integration.engine_life import EngineLife, SyncAfterSteps
from trl_integration.learner_health import (
    divergence_message,
    non_finite_gradient,
    non_finite_weight,
)
from trl_integration.processes import gather_flags


class EngineMixin(WholeCheckpoints):
    """
    [`~transformers.Trainer`] with a rollout engine.

    Attributes:
        engine_life ([`EngineLife`]): the engine and what happens to it during the run.
    """

    args: AgentGRPOConfig
    model: PreTrainedModel
    engine_life: EngineLife
    _metrics: dict[str, defaultdict[str, list[float]]]  # TRL's log, by mode
    _tokenizer: PreTrainedTokenizerBase

    def _start_engine(self, engine: str | RolloutEngine) -> None:
        self.engine_life = EngineLife(
            engine,
            args=self.args,
            accelerator=self.accelerator,
            tokenizer=self._tokenizer,
            learner=self._unwrapped,
            check_learner=self._check_weights,
            save_state=self._save_state,
        )
        self.add_callback(
            SyncAfterSteps(
                self.engine_life.learner_changed,
                lambda: self._append_metrics("train", self.engine_life.after_step()),
            )
        )

    @property
    def rollout_engine(self) -> RolloutEngine:
        return self.engine_life.engine

    def sync_engine(self) -> int:
        """
        Give the engine the learner's current weights.

        Returns:
            `int`: the engine's new policy version.
        """
        self._append_metrics("train", self.engine_life.sync())
        return self.rollout_engine.policy_version

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not self.is_in_train:  # outside of training, weights may change without notice
            self.engine_life.learner_changed()
        return super().evaluate(*args, **kwargs)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _append_metrics(self, mode: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def _unwrapped(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.model)

    # ---- the learner's numbers ----

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        # fp16's gradient scaler skips such steps itself, and DeepSpeed keeps the gradients
        if self.accelerator.sync_gradients and self.accelerator.scaler is None:
            name = non_finite_gradient(self._unwrapped())
            self._end_if_diverged(name and f"the gradient of `{name}` (loss {loss.item():g})")
        return loss

    def _check_weights(self) -> None:
        name = non_finite_weight(self._unwrapped())
        self._end_if_diverged(name and f"`{name}`")

    def _end_if_diverged(self, what: str | None) -> None:
        """End the run on all processes if any has found something that is not finite."""
        if any(gather_flags(self.accelerator, what is not None)[0]):
            what = what or "a tensor of another process"
            raise LearnerDivergedError(
                divergence_message(what, self.state.global_step, self._output_dir)
            )

    # ---- checkpoints ----

    @property
    def _output_dir(self) -> str:
        if self.args.output_dir is None:
            raise ValueError("`output_dir` must be a folder, got None.")
        return self.args.output_dir

    def _save_state(self) -> str | None:
        """Save a checkpoint beside those of the steps; return its folder, None outside of training."""
        if not self.is_in_train:
            return None
        self._save_checkpoint(self.model, trial=None)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        return os.path.join(self._output_dir, name)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._check_weights()  # the newest checkpoint pushes out the oldest
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.args.device.type == "cpu":
            # accelerate numbers the CPUs of several ranks, and torch can't load to "cpu:1"
            vars(self.args)["_setup_devices"] = torch.device("cpu")
        super()._load_optimizer_and_scheduler(checkpoint)
