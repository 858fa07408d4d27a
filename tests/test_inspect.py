"""Recorded trajectories and the progress line."""

import io
import json

import pytest
from fakes import ADD, add, observed, sampled, trajectory, user
from rich.console import Console

from agent_vllm.inspect import RolloutProgress, RolloutRecorder, read_rollouts
from agent_vllm.rollout import RolloutStatus, rollout_single
from agent_vllm.types import StopReason


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "rollouts.jsonl"


def record(path, *trajectories, **extra):
    with RolloutRecorder(path) as recorder:
        for t in trajectories:
            recorder.write(t, **extra)
    return list(read_rollouts(path))


# ---- records ----


def test_what_is_read_is_what_was_written(path, chat, scripted):
    t = rollout_single(scripted([ADD, "3"]), chat, user("汉"), [add], thinking_ratio=1)
    (line,) = record(path, t, step=3, reward=0.5)
    assert (line["step"], line["reward"], line["schema"]) == (3, 0.5, 1)
    assert line["prompt_ids"] == t.prompt_ids
    assert line["completion_ids"] == t.completion_ids
    assert line["completion_mask"] == t.completion_mask
    assert line["logprobs"] == t.logprobs
    assert line["messages"] == t.messages
    assert (line["stop_reason"], line["thinking"]) == ("answered", True)
    assert line["tool_results"] == [{"name": "add", "content": "3", "status": "ok"}]
    assert [span["kind"] for span in line["spans"]] == ["model", "tool", "model"]


def test_every_line_is_whole_as_soon_as_it_is_written(path):
    recorder = RolloutRecorder(path)
    for num_lines in (1, 2):
        recorder.write(trajectory([1], sampled(2), observed(3)))
        lines = path.read_text().splitlines(keepends=True)
        assert [line.endswith("}\n") for line in lines] == [True] * num_lines
    recorder.close()


def test_a_file_that_is_there_is_appended_to(path):
    record(path, trajectory([1]))
    lines = record(path, trajectory([2], stop_reason=StopReason.CONTEXT_FULL))
    assert [line["prompt_ids"] for line in lines] == [[1], [2]]


def test_text_of_several_lines_stays_on_one(path):
    message = {"role": "user", "content": "a\nb\u2028c"}
    lines = record(path, trajectory([1], messages=[message]), trajectory([2]))
    assert [line["messages"] for line in lines] == [[message], []]


def test_lone_surrogates_are_written_as_escapes(path):
    message = {"role": "user", "content": "\ud83d!"}
    (line,) = record(path, trajectory([1], messages=[message]))
    assert line["messages"] == [message]
    assert b"\\ud83d!" in path.read_bytes()


def test_a_truncated_last_line_is_named_after_the_whole_ones(path):
    record(path, trajectory([1]), trajectory([2]))
    path.write_text(path.read_text()[:-10])
    lines = read_rollouts(path)
    assert next(lines)["prompt_ids"] == [1]
    with pytest.raises(ValueError, match=r"rollouts.jsonl:2 is not a whole JSON line"):
        next(lines)


@pytest.mark.parametrize("schema", [{"schema": 2}, {}])
def test_another_schema(path, schema):
    path.parent.mkdir()
    path.write_text(json.dumps(schema) + "\n")
    with pytest.raises(ValueError, match=f":1 has schema {schema.get('schema')}, this version"):
        list(read_rollouts(path))


# ---- progress ----


def shown(monkeypatch, term="xterm", is_terminal=False, **options):
    """What a rollout of two trajectories leaves on a console."""
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
    status = RolloutStatus(num_trajectories=5, num_finished=1, num_in_tools=3)
    line = RolloutProgress(status, "step 3").line()
    assert line.startswith("step 3: 1/5 finished, 1 generating, 3 in tools, 0 tokens, 0/s, ")
