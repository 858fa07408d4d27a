"""The token ledger: every sampled token is trained or left out for one reason with a name."""

import math
import random

import pytest
from fakes import PAD, observed, sampled, trajectory

from agent_vllm.types import StopReason
from trl_integration.fields import to_trl
from trl_integration.ledger import Exclusion, exclusion, token_ledger


@pytest.mark.parametrize("reason", list(StopReason))
def test_what_is_left_out_for_its_ending(reason):
    t = trajectory([1], stop_reason=reason)
    failed = Exclusion.FAILED if reason.is_failure else None
    truncated = Exclusion.TRUNCATED if reason.is_truncated else None
    assert exclusion(t, mask_truncated=False) == failed
    assert exclusion(t, mask_truncated=True) == (failed or truncated)


def test_what_no_reward_function_scored_is_left_out():
    t = trajectory([1], sampled(3, 9))
    assert exclusion(t, mask_truncated=False, rewards=[math.nan] * 2) is Exclusion.UNSCORABLE
    assert exclusion(t, mask_truncated=False, rewards=[math.nan, 0.0]) is None
    assert exclusion(t, mask_truncated=False) is None


def random_trajectory(random):
    segments = []
    for _ in range(random.randrange(4)):
        segments.append(sampled(*range(random.randrange(1, 9))))
        segments.append(observed(*range(random.randrange(1, 9))))
    return trajectory([1], *segments, stop_reason=random.choice(list(StopReason)))


def test_the_ledger_of_random_batches_adds_up():
    for seed in range(200):
        rng = random.Random(seed)
        batch = [random_trajectory(rng) for _ in range(rng.randrange(1, 9))]
        rewards = [rng.choice([[1.0], [math.nan]]) for _ in batch]
        mask_truncated = rng.random() < 0.5
        reasons = [
            exclusion(t, mask_truncated=mask_truncated, rewards=r)
            for t, r in zip(batch, rewards, strict=True)
        ]
        fields = to_trl(batch, PAD, mask_truncated=mask_truncated)
        num_trained = sum(
            sum(mask)
            for mask, reason in zip(fields.tool_mask, reasons, strict=True)
            if reason is not Exclusion.UNSCORABLE
        )
        ledger = token_ledger(batch, reasons, num_trained)
        assert ledger["sampled"] == sum(ledger.values()) - ledger["sampled"], seed
        assert ledger["sampled"] == sum(t.num_sampled_tokens for t in batch), seed


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_mask_that_is_off_by_one_is_noticed(wrong):
    batch = [trajectory([1], sampled(3, 9), observed(4))]
    assert token_ledger(batch, [None], 2)["trained"] == 2
    with pytest.raises(AssertionError, match="does not add up"):
        token_ledger(batch, [None], 2 + wrong)
