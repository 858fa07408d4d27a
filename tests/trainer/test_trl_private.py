"""The list of TRL's private methods that are overridden: whole, up to date, and by name."""

import dataclasses
import inspect
import runpy

import pytest
from trl.trainer.grpo_trainer import GRPOTrainer

from trl_integration import AgentGRPOTrainer, trl_private
from trl_integration.checkpoints import WholeCheckpoints
from trl_integration.engine_mixin import EngineMixin
from trl_integration.rollout_mixin import RolloutMixin
from trl_integration.shared_prefix import SharedPrefixMixin

TRAINER_CLASSES = (
    AgentGRPOTrainer,
    SharedPrefixMixin,
    RolloutMixin,
    EngineMixin,
    WholeCheckpoints,
)


def test_the_installed_trl_is_the_one_that_the_overrides_were_written_for():
    changes = list(trl_private.changes())
    assert not changes, "\n".join(changes)


def test_every_private_method_that_is_overridden_is_listed():
    overridden = {
        name
        for kind in TRAINER_CLASSES
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and name.startswith("_") and hasattr(GRPOTrainer, name)
    }
    listed = {o.name for o in trl_private.OVERRIDES if o.owner is GRPOTrainer}
    assert overridden == listed


def test_a_changed_method_is_named_with_what_to_look_at(monkeypatch):
    def _compute_loss(self, model, inputs):
        return 0.0

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", _compute_loss)
    (change,) = trl_private.changes()
    assert change.startswith("`GRPOTrainer._compute_loss` has changed")
    assert "Look at the columns that it needs" in change


def test_a_method_and_an_attribute_that_are_gone_are_named(monkeypatch):
    gone = dataclasses.replace(trl_private.OVERRIDES[0], name="_no_such_method")
    monkeypatch.setattr(trl_private, "OVERRIDES", (gone,))
    monkeypatch.setattr(trl_private, "ATTRIBUTES", {"no_such_attribute": "It was needed."})
    assert [change.split(" is ")[0] for change in trl_private.changes()] == [
        "`GRPOTrainer._no_such_method`",
        "`GRPOTrainer.no_such_attribute`",
    ]


@pytest.mark.parametrize(
    ("text", "is_same"),
    [("    # another comment\n\n    return 1", True), ("    return 2", False)],
)
def test_comments_do_not_change_a_digest(tmp_path, text, is_same):
    digests = []
    for number, body in enumerate(["    # a comment\n    return 1", text]):
        path = tmp_path / f"module{number}.py"
        path.write_text(f"def method():\n{body}\n")
        method = runpy.run_path(str(path))["method"]
        digests.append(trl_private.source_digest(method))
    assert (digests[0] == digests[1]) == is_same
