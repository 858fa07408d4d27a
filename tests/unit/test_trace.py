"""The Chrome trace, checked against the trace event format."""

import itertools
import json

import pytest
from fakes import sampled, trajectory

from agent_vllm.cli import main
from agent_vllm.record import RolloutRecorder
from agent_vllm.types import Span


def span(kind, name, start_s, end_s):
    return Span(kind=kind, name=name, start_s=start_s, end_s=end_s)


def problems(trace):
    """Return what is wrong with a trace, by the trace event format."""
    found = []
    rows = {}
    for index, event in enumerate(trace["traceEvents"]):
        if event["ph"] not in ("X", "M", "C"):
            found.append(f"{index}: ph {event['ph']}")
        if not (isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]):
            found.append(f"{index}: pid, tid or name")
        if event["ph"] != "M" and not event["ts"] >= 0:
            found.append(f"{index}: ts {event['ts']}")
        if event["ph"] == "C" and not all(value >= 0 for value in event["args"].values()):
            found.append(f"{index}: counter {event['args']}")
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
            if not event["dur"] >= 0:
                found.append(f"{index}: dur {event['dur']}")
    for row, events in rows.items():
        events.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(events):
            if before["ts"] + before["dur"] > after["ts"] + 1e-6:
                found.append(f"{row}: {before['name']} and {after['name']} overlap")
    return found


@pytest.fixture
def trace(tmp_path):
    spans = [
        span("model", "turn 0", 0.0, 1.0),
        span("tool", "search", 1.0, 3.0),
        span("tool", "add", 1.0, 2.0),
        span("model", "turn 1", 3.0, 3.5),
    ]
    with RolloutRecorder(tmp_path / "rollouts.jsonl") as recorder:
        for step, started in ((0, 100.0), (1, 110.0)):
            recorder.write(trajectory([1], sampled(2), spans=spans), step=step, started=started)
            recorder.write(
                trajectory([1], spans=[span("model", "turn 0", 0.5, 2.0)]),
                step=step,
                started=started,
            )
    assert main(["trace", str(recorder.path)]) == 0
    return json.loads((tmp_path / "trace.json").read_text())


def test_a_process_a_step_and_a_row_a_trajectory(trace):
    assert problems(trace) == []
    names = [
        (event["name"], event["pid"], event["args"]["name"])
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    ]
    assert names[:4] == [
        ("process_name", 1, "rollout step 0"),
        ("thread_name", 1, "rollout-0-0-0"),
        ("thread_name", 1, "rollout-0-0-0, side by side 1"),
        ("thread_name", 1, "rollout-0-0-1"),
    ]
    assert [name for *_, name in names[4:]] == [
        "rollout step 1", "rollout-1-0-0", "rollout-1-0-0, side by side 1", "rollout-1-0-1",
    ]  # fmt: skip


def test_spans_are_in_microseconds_since_the_first_rollout(trace):
    spans = [
        (event["pid"], event["cat"], event["name"], event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["args"]["id"].endswith("0-0")
    ]
    first = [
        ("model", "turn 0", 0.0, 1e6),
        ("tool", "search", 1e6, 2e6),
        ("model", "turn 1", 3e6, 0.5e6),
        ("tool", "add", 1e6, 1e6),
    ]
    assert spans == [(1, *rest) for rest in first] + [
        (2, cat, name, ts + 10e6, dur) for cat, name, ts, dur in first
    ]


def test_counters_follow_who_waits_for_what(trace):
    counts = [
        (event["ts"], event["args"]["active"], event["args"]["waiting"])
        for event in trace["traceEvents"]
        if event["ph"] == "C" and event["pid"] == 1
    ]
    assert counts == [
        (0.0, 1, 0), (0.5e6, 2, 0), (1e6, 1, 1), (2e6, 0, 1), (3e6, 1, 0), (3.5e6, 0, 0),
    ]  # fmt: skip


def test_the_checker_sees_overlaps_and_odd_phases():
    event = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    assert problems({"traceEvents": [event, {**event, "ts": 3}]}) == ["(1, 1): a and a overlap"]
    assert problems({"traceEvents": [{**event, "ph": "Q"}]}) == ["0: ph Q"]
