"""The progress line: what it says, and where it moves."""

import io
import re

import pytest
from fakes import ADD, user
from rich.console import Console

from agent_vllm.inspect import RolloutProgress
from agent_vllm.rollout import RolloutStatus, rollout_batch


def shown(monkeypatch, term="xterm", is_terminal=False, **options):
    """Return what a rollout of two trajectories leaves on a console."""
    monkeypatch.setenv("TERM", term)
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=20)
    status = RolloutStatus(num_trajectories=2)
    with RolloutProgress(status, "rollout", console=console, **options):
        status.num_finished, status.num_sampled_tokens = 2, 7
    return output.getvalue()


@pytest.mark.parametrize(("term", "is_terminal"), [("xterm", False), ("dumb", True)])
def test_one_plain_line_where_no_terminal_is(monkeypatch, term, is_terminal):
    text = shown(monkeypatch, term, is_terminal)
    assert text.startswith("rollout: 2/2 finished, 7 tokens, ")
    assert text.endswith(" s\n")
    assert text.count("\n") == 1
    assert "\x1b" not in text


def test_a_terminal_keeps_the_same_line(monkeypatch):
    text = shown(monkeypatch, is_terminal=True)
    assert "\x1b" in text
    assert "rollout: 2/2 finished, 7 tokens, " in text.splitlines()[-1]


def test_nothing_is_shown_when_disabled(monkeypatch):
    assert shown(monkeypatch, enabled=False) == ""


def test_no_line_after_an_error(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    output = io.StringIO()
    progress = RolloutProgress(RolloutStatus(), "rollout", console=Console(file=output))
    with pytest.raises(ZeroDivisionError), progress:
        raise ZeroDivisionError
    assert output.getvalue() == ""


def test_the_line_of_a_running_rollout():
    status = RolloutStatus(num_trajectories=4, num_finished=1, num_in_tools=2)
    status.num_turns, status.max_turn, status.num_sampled_tokens = 6, 3, 50
    with status.calling("slow"), status.calling("quick"):
        line = RolloutProgress(status, "step 3").line()
    parts = re.sub(r"\d+\.\d s", "T s", line).split(", ")
    assert parts[:4] == [
        "step 3: 1/4 finished", "1 generating", "2 in tools", "1.5 turns (most 3)"
    ]  # fmt: skip
    assert parts[4] == "50 tokens"
    assert parts[6:] == ["slow has run T s", "T s", "about 0 s left"]
    assert "has run" not in RolloutProgress(status, "step 3").line()


def test_a_rollout_that_is_over_says_nothing_of_running():
    status = RolloutStatus(num_trajectories=2, num_finished=2, num_turns=3, max_turn=2)
    line = RolloutProgress(status, "eval").line()
    assert line.startswith("eval: 2/2 finished, 1.5 turns (most 2), 0 tokens, 0/s, ")
    assert "left" not in line


def test_the_time_left_is_unknown_until_one_has_finished():
    assert RolloutStatus(num_trajectories=2).remaining_s is None
    assert RolloutStatus(num_trajectories=2, num_finished=2).remaining_s == 0


def test_a_rollout_keeps_its_status_up_to_date(chat, scripted):
    status = RolloutStatus()
    seen = []

    def look(a: int, b: int) -> int:
        """
        Looks at the status.

        Args:
            a: first
            b: second
        """
        seen.append((status.num_in_tools, status.slowest_call[0], status.max_turn))
        return a + b

    look.__name__ = "add"
    rollout_batch(scripted([ADD, "3"]), chat, [user()], [[look]], status=status)
    assert seen == [(1, "add", 1)]
    assert (status.num_finished, status.num_turns, status.max_turn) == (1, 2, 2)
    assert status.slowest_call is None


def test_a_notebook_gets_a_moving_line():
    console = Console(file=io.StringIO(), force_jupyter=True)
    assert RolloutProgress(RolloutStatus(), "rollout", console=console)._can_move
