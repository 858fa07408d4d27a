"""The arithmetic of next-token logprobs."""

import math

import pytest
import torch

from agent_vllm.training import (
    gather_logprobs,
    logprob_gap,
    masked_mean,
    predicted_logprobs,
    shift,
)


def test_shift_drops_the_first_token():
    assert shift(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3], [5, 6]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_gather_is_log_softmax_at_the_token(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 11, generator=generator) * 5  # [B, T, V]
    token_ids = torch.randint(11, (3, 4), generator=generator)
    expected = torch.log_softmax(logits / temperature, -1)
    expected = expected.gather(-1, token_ids[..., None])[..., 0]
    gap = (gather_logprobs(logits, token_ids, temperature) - expected).abs().max().item()
    assert gap < 1e-6, gap


def test_temperature_divides_logits_not_logprobs():
    logits = torch.tensor([2.0, 1.0, 0.0])
    got = [gather_logprobs(logits, torch.tensor(i), 0.5).item() for i in range(3)]
    total = math.log(math.exp(4) + math.exp(2) + 1)
    assert got == pytest.approx([4 - total, 2 - total, -total], abs=1e-6)


def test_low_precision_logits_are_scored_in_float32():
    logits = torch.tensor([[20.0, 19.875]], dtype=torch.bfloat16)
    got = gather_logprobs(logits, torch.tensor([1]))
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(-0.125 - math.log1p(math.exp(-0.125)), abs=1e-6)


def test_a_cut_off_token_has_probability_zero():
    logits = torch.tensor([0.0, -math.inf, 0.0])
    got = [gather_logprobs(logits, torch.tensor(i)).item() for i in range(2)]
    assert got == pytest.approx([-math.log(2), -math.inf])


def test_position_t_scores_token_t_plus_1():
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2] = logits[0, 1, 3] = 50.0  # sure of 2 after the first token, 3 after the second
    right = predicted_logprobs(logits, torch.tensor([[1, 2, 3]]))
    wrong = predicted_logprobs(logits, torch.tensor([[2, 3, 1]]))
    assert right.tolist() == [[0.0, 0.0]]
    assert wrong.tolist() == [[-50.0, -50.0]]


def test_masked_values_stay_out_of_the_mean():
    values = torch.tensor([[1.0, math.nan, 3.0]])
    assert masked_mean(values, torch.tensor([[1, 0, 1]])).item() == 2.0
    assert masked_mean(values, torch.tensor([[0, 0, 0]])).item() == 0.0


def test_gap_over_sampled_tokens():
    engine = torch.tensor([[-1.0, 0.0, -2.0]])
    learner = torch.tensor([[-1.5, -9.0, -2.0]])
    gap = logprob_gap(engine, learner, torch.tensor([[1, 0, 1]]))
    assert (gap.mean, gap.max) == (0.25, 0.5)
    assert gap.kl == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)


def test_gap_of_nothing():
    empty = torch.zeros(2, 0)
    gap = logprob_gap(empty, empty, empty)
    assert (gap.mean, gap.max, gap.kl) == (0.0, 0.0, 0.0)
