"""Values: the views of a trajectory, length checks, limits."""

import dataclasses
import math
import re

import pytest
from fakes import observed, sampled, trajectory

from agent_vllm.errors import InvalidRequestError
from agent_vllm.settings import Limits, SamplingParams
from agent_vllm.types import Completion, Segment, Span, StopReason, ToolResult, Trajectory, Turn


def test_views_of_a_trajectory():
    t = trajectory([1, 2], sampled(3, 9), observed(4, 5), sampled(6, 9, version=1))
    # columns:                   a0 E  t  t  a1 E
    assert t.completion_ids == [3, 9, 4, 5, 6, 9]
    assert t.completion_mask == [1, 1, 0, 0, 1, 1]
    assert t.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert t.policy_versions == [0, 1]
    assert t.num_sampled_tokens == 4


def test_sampled_tokens_are_counted_without_gaps():
    t = trajectory([1], sampled(*[7] * 4), observed(*[0] * 3), sampled(*[7] * 5))
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
        StopReason.AGENT_ERROR,
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
    none = "math.inf" if name == "tool_timeout_s" else "None"
    with pytest.raises(ValueError, match=f"`{name}` must be more than 0, got 0. Use {none}"):
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


@pytest.mark.parametrize("deadline", ["turn_deadline_s", "deadline_s"])
def test_the_default_time_of_a_call_gives_way_and_a_set_one_does_not(deadline):
    assert Limits(**{deadline: 5}).call_timeout_s == 30.0
    for seconds in (30.0, 29.0):
        with pytest.raises(ValueError, match=f"`tool_timeout_s` must be at most `{deadline}`"):
            Limits(**{"tool_timeout_s": seconds, deadline: 5})


def test_infinite_time_for_a_call_means_no_limit():
    assert Limits(tool_timeout_s=math.inf, deadline_s=5).call_timeout_s is None
    assert Limits(tool_timeout_s=7.0).call_timeout_s == 7.0


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("temperature", -1.0, "0 or >= 0.01"),
        ("temperature", 0.001, "0 or >= 0.01"),
        ("temperature", math.nan, "0 or >= 0.01"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", 1.1, "in (0, 1]"),
        ("top_k", -1, "0 (off) or more"),
        ("min_p", -0.1, "in [0, 1]"),
        ("min_p", 2.0, "in [0, 1]"),
        ("stop_strings", "stop", "a list of non-empty strings"),
        ("stop_strings", [""], "a list of non-empty strings"),
    ],
)
def test_sampling_params_are_checked_when_built(name, value, wanted):
    with pytest.raises(InvalidRequestError, match=re.escape(f"`{name}` must be {wanted}, got")):
        SamplingParams(**{name: value})


def test_sampling_params_compare_by_value():
    assert SamplingParams(stop_strings=["a"]) == SamplingParams(stop_strings=("a",))
    assert len({SamplingParams(), SamplingParams(temperature=1.0)}) == 1


# ---- turns ----


def test_a_trajectory_from_segments_is_in_turns():
    segments = [sampled(3, 9), observed(4), sampled(5), sampled(6, 9)]
    t = Trajectory.from_segments(
        prompt_ids=[1], segments=segments, stop_reason=StopReason.ANSWERED, error="e"
    )
    assert [(turn.segment.token_ids, turn.suffix) for turn in t.turns] == [
        ([3, 9], segments[1]),
        ([5], None),
        ([6, 9], None),
    ]
    assert (t.segments, t.turn_outputs, t.num_turns, t.error) == (segments, ["", "", ""], 3, "e")


@pytest.mark.parametrize(
    "segments", [[observed(4), sampled(3)], [sampled(3), observed(4), observed(5)]]
)
def test_an_observed_segment_must_follow_a_sampled_one(segments):
    with pytest.raises(ValueError, match="must follow a sampled one"):
        trajectory([1], *segments)


def test_a_turn_is_sampled_and_what_follows_it_is_not():
    with pytest.raises(ValueError, match="`segment` must be sampled"):
        Turn(segment=observed(1), text="")
    with pytest.raises(ValueError, match="`suffix` must not be sampled"):
        Turn(segment=sampled(1), text="", suffix=sampled(2))


def test_each_token_has_its_own_version():
    mixed = Segment(
        token_ids=[3, 9], logprobs=[-0.5, -0.5], policy_version=1, token_versions=[1, 2]
    )
    t = trajectory([1], mixed, observed(4), sampled(5, version=2))
    # columns:                  a0 E  t     a1
    assert t.token_versions == [1, 2, None, 2]
    assert t.policy_versions == [1, 2]


def test_the_spans_of_a_turn_are_model_calls_user():
    spans = [Span(kind=kind, name="x", start_s=0.0, end_s=2.0) for kind in ("model", "user")]
    call = Span(kind="tool", name="user", start_s=0.0, end_s=3.0)
    result = ToolResult(name="user", content="", status="ok")
    t = trajectory([1], sampled(3), spans=[spans[0], call, spans[1]], tool_results=[result])
    assert t.spans == [spans[0], call, spans[1]]
    assert (t.seconds("model"), t.seconds("tool"), t.seconds("user")) == (2.0, 3.0, 2.0)
    assert [record.span for record in t.calls] == [call]


def test_failures_are_not_the_models():
    failures = [reason for reason in StopReason if reason.is_failure]
    assert failures == [
        StopReason.ENGINE_ERROR,
        StopReason.USER_ERROR,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.AGENT_ERROR,
    ]
    assert all(reason.is_truncated for reason in failures)
