"""The check after the first sync: what it compares, and what counts as rounding."""

import math

import pytest
import torch
from learners import learner

from agent_vllm.engines.learner import check_against_learner, gap_bound, gap_to
from agent_vllm.errors import WeightSyncError
from agent_vllm.training import GapBound, LogprobGap, predicted_logprobs
from agent_vllm.types import Completion

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def engine_of(model, changes):
    """Sample token 3 of `model`, with logprobs that are off by the next of `changes`."""
    offsets = iter(changes)

    def sample(requests):
        completions = []
        for request in requests:
            token_ids = [3] * request.max_new_tokens
            ids = torch.tensor([request.prompt_ids + token_ids])
            with torch.no_grad():
                logprobs = predicted_logprobs(model(ids).logits, ids)[0, -len(token_ids) :]
            values = [value + next(offsets, 0.0) for value in logprobs.tolist()]
            completions.append(
                Completion(
                    token_ids=token_ids, logprobs=values, finish_reason="length", policy_version=0
                )
            )
        return completions

    return sample


def test_the_gap_has_a_mean_and_a_worst_token():
    model = learner()
    gap = gap_to(model, engine_of(model, [0.5, -0.1]), 32, num_prompts=2)  # of 8 and 4 tokens
    assert (gap.max, gap.mean) == (pytest.approx(0.5), pytest.approx(0.6 / 12))


@pytest.mark.parametrize(
    ("dtypes", "device", "bound"),
    [
        ([torch.float32, torch.float32], CPU, GapBound(mean=1e-4, worst=1e-3)),
        ([torch.float32, torch.float32], CUDA, GapBound(mean=0.02, worst=0.02)),
        ([torch.bfloat16, torch.float32], CUDA, GapBound(mean=0.1, worst=2.0)),
        ([torch.float32, torch.float16], CPU, GapBound(mean=0.1, worst=2.0)),
        ([torch.float32, None], CPU, GapBound(mean=0.1, worst=2.0)),
    ],
)
def test_the_coarsest_dtype_and_the_device_say_what_is_rounding(dtypes, device, bound):
    assert gap_bound(*dtypes, device=device) == bound


@pytest.mark.parametrize(
    ("mean", "worst", "holds"),
    [(0.03, 0.6, True), (0.2, 0.6, False), (0.03, 3.0, False), (math.nan, math.nan, False)],
)
def test_mean_and_worst_token_are_bounded_apart(mean, worst, holds):
    gap = LogprobGap(mean=mean, max=worst, kl=0.0)
    assert GapBound(mean=0.1, worst=2.0).holds(gap) is holds


def test_one_token_far_away_in_bfloat16_is_rounding_and_all_of_them_are_not():
    model = learner().bfloat16()
    options = {"vocab_size": 32, "dtype": torch.bfloat16}
    check_against_learner(model, engine_of(model, [0.9]), **options)
    with pytest.raises(WeightSyncError, match="away from the learner's by"):
        check_against_learner(model, engine_of(model, [0.3] * 12), **options)
