"""The arithmetic of limits, without an engine."""

import pytest

from agent_vllm.rollout.budget import Budget, Used
from agent_vllm.settings import Limits
from agent_vllm.types import StopReason, ToolResult


def budget(max_model_len=100, prompt=10, **limits):
    used = {name: limits.pop(name) for name in list(limits) if name in Used.__dataclass_fields__}
    return Budget(
        limits=Limits(**limits),
        max_model_len=max_model_len,
        used=Used(num_prompt_tokens=prompt, **used),
    )


@pytest.mark.parametrize(
    ("limits", "room", "turn_tokens", "tightest"),
    [
        ({}, 90, 90, StopReason.CONTEXT_FULL),
        ({"num_completion_tokens": 60}, 30, 30, StopReason.CONTEXT_FULL),
        ({"max_new_tokens": 8}, 90, 8, StopReason.CONTEXT_FULL),
        ({"max_completion_tokens": 50}, 50, 50, StopReason.COMPLETION_BUDGET),
        ({"max_completion_tokens": 90}, 90, 90, StopReason.CONTEXT_FULL),
        (
            {"max_completion_tokens": 50, "max_new_tokens": 8, "num_completion_tokens": 45},
            5,
            5,
            StopReason.COMPLETION_BUDGET,
        ),
    ],
)
def test_a_turn_gets_the_least_of_what_is_left(limits, room, turn_tokens, tightest):
    left = budget(**limits)
    assert (left.room, left.turn_tokens, left.tightest) == (room, turn_tokens, tightest)


@pytest.mark.parametrize(
    ("state", "stop"),
    [
        ({}, None),
        ({"max_turns": 2, "num_turns": 2, "deadline_s": 1.0, "elapsed_s": 2.0}, "max_turns"),
        ({"max_turns": 0}, "max_turns"),
        ({"deadline_s": 1.0, "elapsed_s": 1.0, "num_completion_tokens": 90}, "deadline"),
        ({"num_completion_tokens": 89}, None),
        ({"num_completion_tokens": 90, "max_completion_tokens": 90}, "context_full"),
        ({"num_completion_tokens": 50, "max_completion_tokens": 50}, "completion_budget"),
        ({"prompt": 100}, "context_full"),
    ],
)
def test_what_forbids_another_turn(state, stop):
    assert budget(**state).stop_before_turn() == stop


@pytest.mark.parametrize(
    ("state", "num_tokens", "stop"),
    [
        ({"max_new_tokens": 8}, 8, "turn_length"),
        ({"num_completion_tokens": 90}, 5, "context_full"),
        ({"num_completion_tokens": 50, "max_completion_tokens": 50}, 5, "completion_budget"),
        ({"max_new_tokens": 8, "num_completion_tokens": 90}, 8, "turn_length"),
        ({}, 5, "turn_length"),  # the engine cut it earlier than it was allowed
    ],
)
def test_which_limit_cut_a_turn(state, num_tokens, stop):
    assert budget(**state).what_cut(num_tokens) == stop


@pytest.mark.parametrize(
    ("state", "time_left_s", "turn_left_s"),
    [
        ({"elapsed_s": 5.0}, None, None),
        ({"elapsed_s": 5.0, "deadline_s": 8.0}, 3.0, 3.0),
        ({"elapsed_s": 9.0, "deadline_s": 8.0}, 0.0, 0.0),
        ({"elapsed_s": 5.0, "turn_started_s": 4.0, "turn_deadline_s": 3.0}, None, 2.0),
        ({"elapsed_s": 9.0, "turn_started_s": 4.0, "turn_deadline_s": 3.0}, None, 0.0),
        (
            {"elapsed_s": 5.0, "turn_started_s": 4.0, "turn_deadline_s": 3.0, "deadline_s": 6.0},
            1.0,
            1.0,
        ),
    ],
)
def test_time_left(state, time_left_s, turn_left_s):
    left = budget(**state)
    assert (left.time_left_s, left.turn_time_left_s) == (time_left_s, turn_left_s)


def test_calls_run_while_rounds_and_time_are_left():
    assert budget(max_tool_rounds=1).stop_before_calls() is None
    assert budget(max_tool_rounds=1, num_tool_rounds=1).stop_before_calls() == "max_turns"
    assert budget(deadline_s=1.0, elapsed_s=1.0).stop_before_calls() == "deadline"


def test_results_close_the_last_turn_and_a_row_of_invalid_calls():
    assert budget(num_turns=1, max_turns=2).stop_after_calls() is None
    assert budget(num_turns=2, max_turns=2).stop_after_calls() == "max_turns"
    state = {"num_turns": 2, "max_turns": 2, "max_invalid_calls": 3}
    assert budget(**state, num_invalid_in_a_row=3).stop_after_calls() == "invalid_calls"
    assert budget(**state, num_invalid_in_a_row=2).stop_after_calls() == "max_turns"


def test_what_was_used_adds_up():
    used = Used(num_prompt_tokens=10).plus_turn(5).plus_suffix(7).plus_turn(2)
    assert (used.num_prompt_tokens, used.num_completion_tokens, used.num_turns) == (10, 14, 2)


def test_only_invalid_calls_at_the_end_are_in_a_row():
    def after(*statuses, used):
        results = [ToolResult(name="t", content="", status=status) for status in statuses]
        return used.plus_tool_round(results)

    used = after("invalid", "ok", "invalid", used=Used(num_prompt_tokens=1))
    assert (used.num_tool_rounds, used.num_invalid_in_a_row) == (1, 1)
    used = after("invalid", "invalid", used=used)
    assert (used.num_tool_rounds, used.num_invalid_in_a_row) == (2, 3)
    assert after("failed", used=used).num_invalid_in_a_row == 0
