"""Turn trajectories into tensors. Padding happens here and nowhere else in this package.

Invariant: padding comes from lengths, never from comparing ids with the pad id.

Legend: B rows, T = longest prompt + completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from agent_vllm.training.logprobs import shift
from agent_vllm.types import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """Hold a learner's tensors, right-padded; column i of the last two predicts token i + 1."""

    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor  # [B, T] int64, 1 on real tokens
    completion_mask: torch.Tensor  # [B, T - 1] int64, 1 where the predicted token was sampled
    old_per_token_logps: torch.Tensor  # [B, T - 1] float32, 0.0 where the mask is 0


def collate(trajectories: Sequence[Trajectory], pad_token_id: int) -> TrainingBatch:
    """Pad the trajectories and shift mask and logprobs.

    With the prompt [A, B, C] and the sampled [D, E]:

        input_ids            A  B  C  D  E
        predictions             B  C  D  E
        completion_mask         0  0  1  1
        old_per_token_logps     0  0  lp(D)  lp(E)

    Args:
        trajectories: B of them, at least one.
        pad_token_id: fills `input_ids` after each row's end.

    Raises:
        ValueError: no trajectories.
    """
    if not trajectories:
        raise ValueError("`trajectories` must hold at least one trajectory, got none.")
    rows = [(t.prompt_ids, t.completion_ids, t.completion_mask, t.logprobs) for t in trajectories]
    input_ids = pad_rows([prompt + ids for prompt, ids, _, _ in rows], pad_token_id)
    mask = pad_rows([[0] * len(prompt) + bits for prompt, _, bits, _ in rows], 0)
    logprobs = pad_rows([[0.0] * len(prompt) + lps for prompt, _, _, lps in rows], 0.0)
    lengths = torch.tensor([len(prompt) + len(ids) for prompt, ids, _, _ in rows])
    return TrainingBatch(
        input_ids=input_ids,
        attention_mask=(torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
        completion_mask=shift(mask),
        old_per_token_logps=shift(logprobs),
    )


def pad_rows(
    rows: Sequence[Sequence[int] | Sequence[float]],
    value: int | float,
    side: Literal["left", "right"] = "right",
) -> torch.Tensor:
    """Pad rows to one tensor `[B, longest]`: int64 for an int `value`, else float32."""
    dtype = torch.long if isinstance(value, int) else torch.float32
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(
        tensors, batch_first=True, padding_value=value, padding_side=side
    )
