"""Trajectories to tensors: padding and the shift, in whole lists."""

import pytest
import torch
from fakes import observed, sampled, trajectory

from agent_vllm.training import collate, pad_rows
from agent_vllm.types import Segment

A, B, C, D, E = 11, 12, 13, 14, 15
PAD = 0


def test_one_turn():
    """The example of `collate`'s docstring."""
    segment = Segment(token_ids=[D, E], logprobs=[-0.25, -0.5], policy_version=0)
    batch = collate([trajectory([A, B, C], segment)], PAD)
    # columns:                                       A  B  C  D  E
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1]]
    # columns:                                       B  C  D  E
    assert batch.completion_mask.tolist() == [[0, 0, 1, 1]]
    assert batch.old_per_token_logps.tolist() == [[0.0, 0.0, -0.25, -0.5]]


def test_many_turns_and_padding():
    batch = collate(
        [
            trajectory([1, 2], sampled(3, 9), observed(4, 5), sampled(6, 9)),
            trajectory([1], sampled(7, 9)),
        ],
        PAD,
    )
    # columns:                          P  P  a0 E  t  t  a1 E
    assert batch.input_ids.tolist() == [[1, 2, 3, 9, 4, 5, 6, 9], [1, 7, 9, 0, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0]]
    # columns:                                P  a0 E  t  t  a1 E
    assert batch.completion_mask.tolist() == [[0, 1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert batch.old_per_token_logps.tolist() == [
        [0.0, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5],
        [-0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
    ]


def test_a_sampled_pad_id_is_a_token_like_others():
    batch = collate([trajectory([PAD, 1], sampled(PAD, 9)), trajectory([1], sampled(9))], PAD)
    # columns:                               P  P  a  E
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.completion_mask.tolist() == [[0, 1, 1], [1, 0, 0]]


def test_turns_after_an_end_token_stay_trained():
    batch = collate([trajectory([1], sampled(3, 9), observed(4), sampled(5, 9))], PAD)
    # columns:                                 3  9  4  5  9
    assert batch.completion_mask.tolist() == [[1, 1, 0, 1, 1]]


def test_pad_ids_inside_a_row_are_attended_to():
    batch = collate([trajectory([PAD, 1], sampled(PAD, 3)), trajectory([1], sampled(3))], PAD)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_all_columns_have_one_width_and_padding_is_never_trained():
    batch = collate([trajectory([1], sampled(3)), trajectory([1], sampled(3), observed(4, 5))], PAD)
    assert batch.completion_mask.shape == batch.old_per_token_logps.shape == (2, 3)
    assert batch.completion_mask.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_a_row_without_completion_is_all_prompt_and_padding():
    batch = collate([trajectory([1, 2]), trajectory([1], sampled(7, 9))], PAD)
    # columns:                          P  P
    assert batch.input_ids.tolist() == [[1, 2, 0], [1, 7, 9]]
    assert batch.completion_mask.tolist() == [[0, 0], [1, 1]]


def test_types():
    batch = collate([trajectory([1], sampled(7))], PAD)
    assert (batch.input_ids.dtype, batch.attention_mask.dtype) == (torch.int64, torch.int64)
    assert (batch.completion_mask.dtype, batch.old_per_token_logps.dtype) == (
        torch.int64,
        torch.float32,
    )


def test_no_trajectories():
    with pytest.raises(ValueError, match="at least one trajectory, got none"):
        collate([], PAD)


@pytest.mark.parametrize(
    ("side", "rows"), [("right", [[1, 2], [3, 0]]), ("left", [[1, 2], [0, 3]])]
)
def test_padding_sides(side, rows):
    assert pad_rows([[1, 2], [3]], 0, side).tolist() == rows
