"""A learner whose numbers are no longer finite, in the real trainer: it is named, and nothing is
saved from it or blamed on the engine."""

import math
from pathlib import Path

import pytest
import torch
from trainers import TOOLS
from transformers import TrainerCallback

from agent_vllm.errors import LearnerDivergedError
from trl_integration import AgentGRPOTrainer

WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def make_trainer(new_trainer):
    """Train three steps, with a checkpoint after each."""

    def make(*callbacks, **changes):
        defaults = {
            "max_steps": 3, "max_turns": 2, "tools": TOOLS, "save_strategy": "steps",
            "save_steps": 1, "save_total_limit": 2, "reward_funcs": alternating_reward,
            "callbacks": list(callbacks),
        }  # fmt: skip
        return new_trainer("torch", **{**defaults, **changes})

    return make


def alternating_reward(completions, **_):
    return [float(index % 2) for index in range(len(completions))]


class Spoil(TrainerCallback):
    """Put NaN into a weight at a moment of the second step."""

    def __init__(self, moment):
        setattr(self, moment, self._spoil)

    def _spoil(self, args, state, control, model, **_):
        if state.global_step == 1:
            with torch.no_grad():
                model.get_parameter(WEIGHT)[0, 0] = math.nan


class NanLoss(AgentGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) * math.nan


def checkpoints(trainer):
    return sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("moment", "num_steps", "on_engine_death"),
    [
        ("on_step_begin", 1, "stop"),  # the shared engine samples from it
        ("on_step_begin", 1, "rebuild"),
        ("on_optimizer_step", 2, "stop"),
        ("on_save", 1, "rebuild"),
    ],
)
def test_a_weight_that_is_nan_ends_the_run_by_its_name(
    make_trainer, moment, num_steps, on_engine_death
):
    trainer = make_trainer(Spoil(moment), on_engine_death=on_engine_death)
    with pytest.raises(LearnerDivergedError) as caught:
        trainer.train()
    last = str(Path(trainer.args.output_dir, "checkpoint-1"))
    message = str(caught.value)
    assert f"diverged: `{WEIGHT}` has NaN or infinity after {num_steps} optimizer" in message
    assert f"last finite checkpoint: `trainer.train(resume_from_checkpoint={last!r})`" in message
    assert "engine" not in message
    assert checkpoints(trainer) == ["checkpoint-1"]
    assert trainer.engine_life.num_rebuilds == 0


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_gradient_that_is_infinite_ends_the_run_before_the_step(make_trainer, max_grad_norm):
    trainer = make_trainer(max_grad_norm=max_grad_norm)
    trainer.model.get_parameter(WEIGHT).register_hook(
        lambda gradient: gradient * (math.inf if trainer.state.global_step == 1 else 1.0)
    )
    with pytest.raises(LearnerDivergedError, match=rf"the gradient of `{WEIGHT}` \(loss "):
        trainer.train()
    assert checkpoints(trainer) == ["checkpoint-1"]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_a_loss_that_is_nan_ends_the_run(make_trainer):
    trainer = make_trainer(trainer_class=NanLoss)
    with pytest.raises(LearnerDivergedError, match=r"the gradient of `model.*` \(loss nan\)"):
        trainer.train()


def test_without_a_checkpoint_the_error_says_so(make_trainer):
    trainer = make_trainer(Spoil("on_step_begin"), save_strategy="no")
    with pytest.raises(LearnerDivergedError, match="There is no earlier checkpoint"):
        trainer.train()
    assert checkpoints(trainer) == []
