"""Checkpoints of the real trainer: whole or not there, whatever happens while one is written."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trainers
from paths import PYTHONPATH
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from trl_integration import AgentGRPOTrainer

SETTINGS = {
    "max_steps": 3, "max_turns": 1, "tools": trainers.TOOLS, "save_strategy": "steps",
    "save_steps": 1, "save_total_limit": 2, "reward_funcs": trainers.REWARDS,
}  # fmt: skip


class FailsHalfWay(AgentGRPOTrainer):
    """Writes the model and the optimizer of the second checkpoint, and no more."""

    @staticmethod
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    def _save_rng_state(self, output_dir):
        if self.state.global_step == 2:
            self.fail()
        super()._save_rng_state(output_dir)


class IsKilledHalfWay(FailsHalfWay):
    @staticmethod
    def fail():
        os.kill(os.getpid(), signal.SIGKILL)


def folders(path):
    return sorted(entry.name for entry in Path(path).iterdir() if entry.is_dir())


def test_a_save_that_fails_half_way_leaves_the_last_checkpoint_usable(new_trainer, tmp_path):
    trainer = new_trainer("torch", trainer_class=FailsHalfWay, **SETTINGS)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert folders(tmp_path / "out") == ["checkpoint-1"]
    again = new_trainer("torch", **SETTINGS)
    again.train(resume_from_checkpoint=True)
    assert folders(tmp_path / "out") == ["checkpoint-2", "checkpoint-3"]
    assert next(log["step"] for log in again.state.log_history[1:]) == 2


@pytest.mark.e2e
def test_kill_9_in_the_middle_of_a_save_leaves_the_last_checkpoint_usable(
    new_trainer, agent_path, tmp_path
):
    command = [sys.executable, __file__, agent_path, tmp_path / "out"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": PYTHONPATH}, timeout=300)
    assert run.returncode == -signal.SIGKILL
    assert folders(tmp_path / "out") == ["_unfinished", "checkpoint-1"]
    assert (tmp_path / "out/_unfinished/checkpoint-2/optimizer.pt").exists()
    again = new_trainer("torch", **SETTINGS)
    again.train(resume_from_checkpoint=True)
    assert folders(tmp_path / "out") == ["checkpoint-2", "checkpoint-3"]


def train_and_be_killed(agent_path, folder):
    agent = trainers.fresh(agent_path)
    trainers.build(agent, folder, "torch", trainer_class=IsKilledHalfWay, **SETTINGS).train()


def test_a_step_that_is_saved_again_replaces_its_checkpoint(new_trainer, tmp_path):
    """As when the engine dies after a save: the run's state is saved once more."""
    trainer = new_trainer("torch", **{**SETTINGS, "max_steps": 1})
    trainer.train()
    (tmp_path / "out/checkpoint-1/old").touch()
    trainer._save_checkpoint(trainer.model, trial=None)
    assert folders(tmp_path / "out") == ["checkpoint-1"]
    names = {path.name for path in (tmp_path / "out/checkpoint-1").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json"} <= names - {"old"} == names


def test_the_best_checkpoint_is_known_by_its_name_and_kept(new_trainer, tmp_path):
    """The first evaluation is the best one, since the metric is the step."""

    class Judge(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **_):
            metrics["eval_step"] = state.global_step

    trainer = new_trainer(
        "torch", eval_dataset=trainers.rows(4), eval_strategy="steps", eval_steps=1,
        metric_for_best_model="step", greater_is_better=False, load_best_model_at_end=True,
        callbacks=[Judge()], num_generations_eval=4, per_device_eval_batch_size=4,
        **{**SETTINGS, "max_steps": 4},
    )  # fmt: skip
    trainer.train()
    best = str(tmp_path / "out/checkpoint-1")
    assert folders(tmp_path / "out") == ["checkpoint-1", "checkpoint-4"]
    assert trainer.state.best_model_checkpoint == best
    last = get_last_checkpoint(tmp_path / "out")
    for folder in (best, last):
        state = TrainerState.load_from_json(f"{folder}/trainer_state.json")
        assert state.best_model_checkpoint == best


def test_a_checkpoint_is_uploaded_from_where_it_stays(new_trainer, tmp_path, monkeypatch):
    uploaded = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda _, folder: uploaded.append(os.listdir(folder))
    )
    trainer = new_trainer("torch", **{**SETTINGS, "max_steps": 1})
    trainer.args.push_to_hub = True  # an argument of the config would ask the Hub
    trainer.train()
    assert uploaded == [os.listdir(tmp_path / "out/checkpoint-1")]


if __name__ == "__main__":
    train_and_be_killed(*sys.argv[1:])
