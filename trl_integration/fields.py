"""Trajectories to the fields that TRL's GRPO trainer works with. Pure: no trainer, no tensors.

Invariant: `tool_mask` is 1 exactly where a token was sampled and is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_vllm.types import Trajectory
from trl_integration.ledger import exclusion


@dataclass(frozen=True, kw_only=True, slots=True)
class TRLFields:
    """One list entry a row, in the trajectories' order.

    Legend: P prompt tokens, C completion tokens of the row.
    """

    prompt_ids: list[list[int]]  # [P]
    completion_ids: list[list[int]]  # [C]
    tool_mask: list[list[int]]  # [C]
    logprobs: list[list[float]]  # [C], 0.0 where nothing was sampled
    completions: list[list[dict[str, Any]]]  # messages after the prompt

    @property
    def num_trained_tokens(self) -> list[int]:
        return [sum(mask) for mask in self.tool_mask]


def to_trl(
    trajectories: Sequence[Trajectory], pad_token_id: int, *, mask_truncated: bool = False
) -> TRLFields:
    """TRL's view of finished trajectories.

    A row without completion tokens is given one pad token with mask 0: TRL's tensors need a column,
    and a mask of zeros keeps it out of every sum.

    Args:
        mask_truncated: leave whole trajectories out of the loss whose stop reason says that the
            model was cut off (TRL's `mask_truncated_completions`).
    """
    rows = [_row(t, pad_token_id, mask_truncated) for t in trajectories]
    return TRLFields(
        prompt_ids=[t.prompt_ids for t in trajectories],
        completion_ids=[ids for ids, _, _ in rows],
        tool_mask=[mask for _, mask, _ in rows],
        logprobs=[logprobs for _, _, logprobs in rows],
        completions=[t.completion_messages for t in trajectories],
    )


def _row(
    trajectory: Trajectory, pad_token_id: int, mask_truncated: bool
) -> tuple[list[int], list[int], list[float]]:
    ids, mask = trajectory.completion_ids, trajectory.completion_mask
    if not ids:
        return [pad_token_id], [0], [0.0]
    if exclusion(trajectory, mask_truncated=mask_truncated) is not None:
        mask = [0] * len(ids)
    return ids, mask, trajectory.logprobs


def reward_columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """What reward functions get beside the dataset's columns, one entry a row."""
    return {
        "stop_reason": [t.stop_reason.value for t in trajectories],
        "turn_outputs": [t.turn_outputs for t in trajectories],
        "num_turns": [t.num_turns for t in trajectories],
        "num_calls": [len(t.tool_results) for t in trajectories],
        "num_invalid_calls": [
            sum(result.status == "invalid" for result in t.tool_results) for t in trajectories
        ],
    }
