"""List the private methods and attributes of TRL that this package overrides, and why.

Owns the digest of each overridden method in the TRL that was tested. Invariant: whatever the trainer
overrides stands here; `changes` names what an installed TRL has altered.
"""

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import Trainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.grpo_trainer import GRPOTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """Describe one private method of TRL that is overridden or repeated here."""

    owner: type
    name: str
    why: str
    look_at: str  # what to compare with a changed method
    digest: str
    lines_with: str = ""  # the digest is of the lines that have this text

    @property
    def current_digest(self) -> str | None:
        """Return the digest of the installed method; None if there is none."""
        method = getattr(self.owner, self.name, None)
        return None if method is None else source_digest(method, self.lines_with)


OVERRIDES = (
    Override(
        owner=GRPOTrainer,
        name="__init__",
        why="It starts TRL's own vLLM under `use_vllm`, which is therefore set afterwards.",
        look_at="the checks that it makes under `use_vllm`: `checks._check_correction` repeats them",
        digest="868b38528d4f4ac0",
        lines_with="use_vllm",
    ),
    Override(
        owner=VLLMGeneration,
        name="_init_vllm",
        why="TRL's vLLM is never started.",
        look_at="the settings that it checks: `settings_table` refuses them",
        digest="eada55c2b448092a",
    ),
    Override(
        owner=GRPOTrainer,
        name="_generate_and_score_completions",
        why="A lost rollout is retried; excluded trajectories leave the loss's mask.",
        look_at="the keys of its output, and the order in which it calls `_generate` and `_calculate_rewards`",
        digest="053129b7e8f87be8",
    ),
    Override(
        owner=GRPOTrainer,
        name="_generate",
        why="The rollout engine samples whole trajectories.",
        look_at="the tuple that it returns, and the metrics that it logs: `metrics.rollout_metrics` has them",
        digest="013a2f1ae8faced3",
    ),
    Override(
        owner=GRPOTrainer,
        name="_calculate_rewards",
        why="Ids without padding go to the reward functions; failed trajectories get NaN.",
        look_at="its arguments, and that it returns the rewards of all processes",
        digest="4879347da0d40f89",
    ),
    Override(
        owner=GRPOTrainer,
        name="_prepare_inputs",
        why="Rows with the same prompt go into one micro-batch of their optimizer step.",
        look_at="what it buffers, and which buffered batch it returns",
        digest="0b769b55fe83e200",
    ),
    Override(
        owner=GRPOTrainer,
        name="_get_per_token_logps_and_entropies",
        why=(
            'With old_logprobs="sampler" the engine has the old log-probabilities: no forward pass. '
            "Rows are scored as a prefix tree."
        ),
        look_at="its arguments, which calls are for the old policy, and how it calls the model",
        digest="2e4dd3439e4f7630",
    ),
    Override(
        owner=GRPOTrainer,
        name="_compute_loss",
        why="The gap between engine and learner is measured where the learner's logprobs are known.",
        look_at="the columns that it needs, and that it computes the entropy",
        digest="0e531d07884c068d",
    ),
    Override(
        owner=GRPOTrainer,
        name="_save_checkpoint",
        why="A checkpoint is written whole under another name and renamed, and only if it is finite.",
        look_at="its arguments, and the files that it writes",
        digest="e1179698f93075ef",
    ),
    Override(
        owner=Trainer,
        name="_save_checkpoint",
        why="The same: it writes, pushes and rotates the checkpoints.",
        look_at="what it does with `_get_output_dir`: `checkpoints._put_in_place` repeats its end",
        digest="6b93fb5a53a54d67",
    ),
    Override(
        owner=GRPOTrainer,
        name="_get_output_dir",
        why="While a checkpoint is written, it is another folder.",
        look_at="who calls it",
        digest="e39f563caf58bc49",
    ),
    Override(
        owner=GRPOTrainer,
        name="_push_from_checkpoint",
        why="A checkpoint is uploaded once it has its name.",
        look_at="which folder it reads",
        digest="dc26feaf3eb3666f",
    ),
    Override(
        owner=GRPOTrainer,
        name="_load_optimizer_and_scheduler",
        why='accelerate numbers the CPUs of several ranks, and torch can\'t load to "cpu:1".',
        look_at="the device that it loads to",
        digest="59c16c6d1d66b94d",
    ),
)

# Attributes of TRL's trainer that are set after its constructor.
ATTRIBUTES = {
    "environment_factories": "TRL's handling of environments lets one end all of them.",
    "environments": "Reward functions get the environments of the rollout.",
    "mask_truncated_completions": "TRL judges truncation by the last token, not by the stop reason.",
    "reward_funcs": "Reward functions must not see failed trajectories.",
    "tools": "TRL's constructor would choose template and parser for them.",
    "use_vllm": "Switches on TRL's correction for the distance between engine and learner.",
}


def source_digest(method: Callable[..., Any], lines_with: str = "") -> str:
    """Return a digest of a method's source, without its comments' lines, blank lines and indentation."""
    source = textwrap.dedent(inspect.getsource(method))
    lines = [line for line in source.splitlines() if line.strip() and line.strip()[0] != "#"]
    kept = [line for line in lines if lines_with in line]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def changes() -> Iterator[str]:
    """Yield one line per override that the installed TRL has changed: its name and what to look at."""
    for override in OVERRIDES:
        name = f"{override.owner.__name__}.{override.name}"
        current = override.current_digest
        if current is None:
            yield f"`{name}` is gone. {override.why} Look at {override.look_at}."
        elif current != override.digest:
            yield (
                f"`{name}` has changed (digest {current}). {override.why} Look at "
                f"{override.look_at}."
            )
    source = inspect.getsource(GRPOTrainer)
    for name, why in ATTRIBUTES.items():
        if f"self.{name}" not in source:
            yield f"`GRPOTrainer.{name}` is gone. {why}"
