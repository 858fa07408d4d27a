"""Convert trajectories to the fields of TRL's trainers, and account for every sampled token.

Invariants: `tool_mask` is 1 exactly where a token was sampled and may be trained; sampled tokens =
trained + truncated + failed + unscorable + mismatched + forked, where trained tokens are counted in the
loss's mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agent_vllm.types import Trajectory


class Exclusion(StrEnum):
    """Name the reason that no token of a trajectory is trained."""

    FAILED = "failed"  # its engine, user, environment or agent failed
    TRUNCATED = "truncated"  # it was cut off, and `mask_truncated_completions` is on
    UNSCORABLE = "unscorable"  # every reward function returned None for it
    MISMATCHED = "mismatched"  # the engine's logprobs are too far from the learner's


@dataclass(frozen=True, kw_only=True, slots=True)
class TRLFields:
    """Hold one list entry per row, in the order of the trajectories.

    Legend: P prompt tokens, C completion tokens of the row.
    """

    prompt_ids: list[list[int]]  # [P]
    completion_ids: list[list[int]]  # [C]
    tool_mask: list[list[int]]  # [C]
    logprobs: list[list[float]]  # [C], 0.0 where nothing was sampled
    completions: list[list[dict[str, Any]]] | list[str]  # messages after the prompt, or text


def exclusion(trajectory: Trajectory, *, mask_truncated: bool = False) -> Exclusion | None:
    """Return why a trajectory must not be trained, as far as its ending tells; None if it may be.

    Args:
        mask_truncated: exclude trajectories that were cut off (TRL's `mask_truncated_completions`).
    """
    if trajectory.stop_reason.is_failure:
        return Exclusion.FAILED
    if mask_truncated and trajectory.stop_reason.is_truncated:
        return Exclusion.TRUNCATED
    return None


def to_trl(
    trajectories: Sequence[Trajectory],
    pad_token_id: int,
    exclusions: Sequence[Exclusion | None],
    *,
    as_text: bool = False,
) -> TRLFields:
    """Convert finished trajectories to TRL's fields.

    A row without completion tokens gets one pad token with mask 0: TRL's tensors need a column, and
    the mask keeps it out of every sum.

    Args:
        exclusions: one per trajectory; the mask of an excluded one is 0 everywhere.
        as_text: completions are the text of the messages, as TRL has it where prompts are text.
    """
    completions = [t.completion_messages for t in trajectories]
    rows = [
        _row(trajectory, pad_token_id, reason is not None)
        for trajectory, reason in zip(trajectories, exclusions, strict=True)
    ]
    return TRLFields(
        prompt_ids=[t.prompt_ids for t in trajectories],
        completion_ids=[ids for ids, _, _ in rows],
        tool_mask=[mask for _, mask, _ in rows],
        logprobs=[logprobs for _, _, logprobs in rows],
        completions=list(map(_text, completions)) if as_text else completions,
    )


def _text(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(message["content"] for message in messages)


def _row(
    trajectory: Trajectory, pad_token_id: int, is_excluded: bool
) -> tuple[list[int], list[int], list[float]]:
    ids, mask = trajectory.completion_ids, trajectory.completion_mask
    if not ids:
        return [pad_token_id], [0], [0.0]
    return ids, [0] * len(ids) if is_excluded else mask, trajectory.logprobs


def token_ledger(
    trajectories: Sequence[Trajectory], exclusions: Sequence[Exclusion | None], num_trained: int
) -> dict[str, int]:
    """Count the sampled tokens, the trained ones, and the excluded ones by reason.

    A trained trajectory's branches are `forked`: a row of TRL's batch holds one conversation.

    Args:
        num_trained: counted in the loss's mask.

    Raises:
        AssertionError: the counts do not add up, so the mask is wrong.
    """
    ledger = {"sampled": 0, "trained": num_trained, **dict.fromkeys(Exclusion, 0), "forked": 0}
    for trajectory, reason in zip(trajectories, exclusions, strict=True):
        num_told, num_branches = trajectory.num_sampled_tokens, trajectory.num_branch_tokens
        ledger["sampled"] += num_told + num_branches
        ledger[reason or "forked"] += num_branches
        if reason is not None:
            ledger[reason] += num_told
    num_excluded = sum(ledger[reason] for reason in [*Exclusion, "forked"])
    assert ledger["sampled"] == num_trained + num_excluded, (
        f"token ledger does not add up: {ledger}"
    )
    return {str(name): count for name, count in ledger.items()}
