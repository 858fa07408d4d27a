"""Where the sampled tokens of a batch went: into the loss, or out of it for a reason with a name.

Invariant: sampled = trained + truncated + failed + unscorable, where trained is counted in the mask
that the loss uses.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

from agent_vllm.types import Trajectory


class Exclusion(StrEnum):
    """Why no token of a trajectory is trained."""

    FAILED = "failed"  # its engine, user or environment failed
    TRUNCATED = "truncated"  # it was cut off, and `mask_truncated_completions` is on
    UNSCORABLE = "unscorable"  # every reward function returned None for it


def exclusion(
    trajectory: Trajectory, *, mask_truncated: bool = False, rewards: Sequence[float] = ()
) -> Exclusion | None:
    """Why the trajectory is left out, None where it is trained.

    Args:
        rewards: one a reward function, NaN for None; leave out what is not known yet.
    """
    if trajectory.stop_reason.is_failure:
        return Exclusion.FAILED
    if mask_truncated and trajectory.stop_reason.is_truncated:
        return Exclusion.TRUNCATED
    if rewards and all(map(math.isnan, rewards)):
        return Exclusion.UNSCORABLE
    return None


def token_ledger(
    trajectories: Sequence[Trajectory], exclusions: Sequence[Exclusion | None], num_trained: int
) -> dict[str, int]:
    """Tokens sampled, trained and left out by reason.

    Args:
        num_trained: counted in the loss's mask.

    Raises:
        AssertionError: they don't add up, so the mask is wrong.
    """
    ledger = {"sampled": 0, "trained": num_trained, **dict.fromkeys(Exclusion, 0)}
    for trajectory, reason in zip(trajectories, exclusions, strict=True):
        ledger["sampled"] += trajectory.num_sampled_tokens
        if reason is not None:
            ledger[reason] += trajectory.num_sampled_tokens
    left_out = sum(ledger[reason] for reason in Exclusion)
    assert ledger["sampled"] == num_trained + left_out, f"token ledger does not add up: {ledger}"
    return {str(name): count for name, count in ledger.items()}
