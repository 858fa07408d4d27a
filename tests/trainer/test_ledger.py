"""The token ledger: every sampled token is trained or left out for one reason with a name."""

import math
import random

import pytest
import torch
from fakes import PAD, observed, sampled, trajectory

from agent_vllm.types import StopReason
from trl_integration.fields import Exclusion, exclusion, to_trl, token_ledger
from trl_integration.training_rollout import TrainingRollout


@pytest.mark.parametrize("reason", list(StopReason))
def test_what_is_left_out_for_its_ending(reason):
    t = trajectory([1], stop_reason=reason)
    failed = Exclusion.FAILED if reason.is_failure else None
    truncated = Exclusion.TRUNCATED if reason.is_truncated else None
    assert exclusion(t, mask_truncated=False) == failed
    assert exclusion(t, mask_truncated=True) == (failed or truncated)


def scored(batch, rewards, *, mask_truncated):
    """A rollout whose trajectories and rewards are known."""
    rollout = TrainingRollout(
        mode="train", step=0, seed=0, rows=[{}], tools=[[]], rewards=torch.empty(0)
    )
    rollout.finish(batch, mask_truncated=mask_truncated)
    rollout.score(torch.tensor(rewards))
    return rollout


def test_a_trajectory_that_no_reward_function_scored_is_excluded():
    ended, cut, lost = (
        trajectory([1], sampled(3, 9), stop_reason=reason)
        for reason in (StopReason.ANSWERED, StopReason.TURN_LENGTH, StopReason.ENGINE_ERROR)
    )
    nan = math.nan
    rewards = [[nan, nan], [nan, 0.0], [1.0, 2.0], [nan, nan], [nan, nan]]
    rollout = scored([ended, ended, ended, cut, lost], rewards, mask_truncated=True)
    assert rollout.exclusions == [
        Exclusion.UNSCORABLE, None, None, Exclusion.TRUNCATED, Exclusion.FAILED,
    ]  # fmt: skip
    assert rollout.is_trained == [False, True, True, False, False]
    assert rollout.is_failed == [False, False, False, False, True]


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
        reasons = scored(batch, rewards, mask_truncated=mask_truncated).exclusions
        by_ending = [exclusion(t, mask_truncated=mask_truncated) for t in batch]
        fields = to_trl(batch, PAD, by_ending)
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
