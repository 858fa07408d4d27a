"""Values: the views of a trajectory, length checks, limits."""

import dataclasses
import re

import pytest
from fakes import observed, sampled, trajectory

from agent_vllm.types import Completion, Limits, Segment, Span, StopReason, ToolResult


def test_views_of_a_trajectory():
    t = trajectory([1, 2], sampled(3, 9), observed(4, 5), sampled(6, 9, version=1))
    # columns:                   a0 E  t  t  a1 E
    assert t.completion_ids == [3, 9, 4, 5, 6, 9]
    assert t.completion_mask == [1, 1, 0, 0, 1, 1]
    assert t.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert t.policy_versions == [0, 1]
    assert t.num_sampled_tokens == 4


def test_sampled_tokens_are_counted_without_gaps():
    t = trajectory(
        [1], observed(*[0] * 3), sampled(*[7] * 4), observed(*[0] * 3), sampled(*[7] * 5)
    )
    assert t.num_sampled_tokens == 9


def test_an_empty_turn_has_no_tokens():
    t = trajectory([1], sampled(), observed(4))
    assert (t.completion_ids, t.completion_mask, t.logprobs) == ([4], [0], [0.0])


def test_a_trajectory_without_segments():
    t = trajectory([1], stop_reason=StopReason.CONTEXT_FULL)
    assert (t.completion_ids, t.completion_mask, t.logprobs, t.policy_versions) == ([], [], [], [])


def test_completion_messages_come_after_the_prompt():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    t = trajectory([1], messages=messages, num_prompt_messages=1)
    assert t.completion_messages == messages[1:]


def test_seconds_by_kind():
    spans = [
        Span(kind="model", name="turn 0", start_s=0.0, end_s=1.0),
        Span(kind="tool", name="add", start_s=1.0, end_s=4.0),
        Span(kind="model", name="turn 1", start_s=4.0, end_s=4.5),
    ]
    t = trajectory([1], spans=spans)
    assert (t.seconds("model"), t.seconds("tool")) == (1.5, 3.0)


@pytest.mark.parametrize("value", [Segment, Completion])
def test_lengths_must_agree(value):
    fields = {"token_ids": [1, 2, 3], "logprobs": [-0.1], "policy_version": 0}
    if value is Completion:
        fields["finish_reason"] = "stop"
    with pytest.raises(ValueError, match="must have one length, got 3 and 1"):
        value(**fields)


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        observed(1).token_ids = [2]


def test_a_tool_result_as_a_message():
    result = ToolResult(name="add", content="3", status="ok")
    assert result.message == {"role": "tool", "name": "add", "content": "3"}


def test_which_endings_are_cut_off_and_which_are_unfinished():
    truncated = {reason for reason in StopReason if reason.is_truncated}
    unfinished = {r for r in StopReason if trajectory([1], stop_reason=r).unfinished}
    assert truncated == {
        StopReason.TURN_LENGTH,
        StopReason.COMPLETION_BUDGET,
        StopReason.CONTEXT_FULL,
        StopReason.DEADLINE,
        StopReason.ENGINE_ERROR,
        StopReason.USER_ERROR,
        StopReason.ENVIRONMENT_ERROR,
    }
    assert unfinished == {*truncated, StopReason.MAX_TURNS, StopReason.INVALID_CALLS}


@pytest.mark.parametrize("name", ["max_turns", "max_tool_rounds"])
def test_zero_is_a_limit_of_its_own(name):
    assert getattr(Limits(**{name: 0}), name) == 0
    with pytest.raises(ValueError, match=f"`{name}` must be 0 or more, got -1"):
        Limits(**{name: -1})


@pytest.mark.parametrize(
    "name",
    [
        "max_new_tokens",
        "max_completion_tokens",
        "max_invalid_calls",
        "max_tool_result_tokens",
        "tool_timeout_s",
        "turn_deadline_s",
        "deadline_s",
    ],
)
def test_other_limits_are_more_than_zero_or_none(name):
    assert getattr(Limits(**{name: None}), name) is None
    with pytest.raises(ValueError, match=f"`{name}` must be more than 0, got 0. Use None"):
        Limits(**{name: 0})


NESTED = [
    ("tool_timeout_s", "turn_deadline_s"),
    ("tool_timeout_s", "deadline_s"),
    ("turn_deadline_s", "deadline_s"),
    ("max_new_tokens", "max_completion_tokens"),
    ("max_tool_result_tokens", "max_completion_tokens"),
]


@pytest.mark.parametrize(("name", "tighter"), NESTED)
def test_a_limit_that_can_not_be_reached_is_refused(name, tighter):
    message = (
        f"`{name}` must be at most `{tighter}`, got 9 and 8: it can't be reached. "
        f"Lower `{name}` or raise `{tighter}`."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Limits(**{name: 9, tighter: 8})
    same = Limits(**{name: 8, tighter: 8})
    assert (getattr(same, name), getattr(same, tighter)) == (8, 8)
    assert getattr(Limits(**{name: None, tighter: 8}), tighter) == 8


@pytest.mark.parametrize("name", ["turn_deadline_s", "deadline_s"])
def test_the_default_time_of_a_call_gives_way(name):
    limits = Limits(**{name: 10})
    assert (limits.tool_timeout_s, getattr(limits, name)) == (30.0, 10)


def test_failures_are_not_the_models():
    failures = [reason for reason in StopReason if reason.is_failure]
    assert failures == [
        StopReason.ENGINE_ERROR,
        StopReason.USER_ERROR,
        StopReason.ENVIRONMENT_ERROR,
    ]
    assert all(reason.is_truncated for reason in failures)
