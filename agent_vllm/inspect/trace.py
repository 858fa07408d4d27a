"""Recorded rollouts as a Chrome trace, which https://ui.perfetto.dev opens.

A process is one rollout of a step, a row (thread) one trajectory; calls that ran side by side get
rows of their own beneath it. Times are microseconds since the first rollout began.
"""

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_vllm.inspect.read import batch_name, read_batches
from agent_vllm.inspect.schema import RolloutRecord
from agent_vllm.spans import merged

HELP = "write recorded rollouts as a Chrome trace, for Perfetto"
Event = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl of a run, or its export")
    parser.add_argument("-o", "--output", type=Path, help="default: trace.json beside it")


def run(args: argparse.Namespace) -> int:
    output = args.output or args.rollouts.with_name("trace.json")
    write_trace(args.rollouts, output)
    print(f"wrote {output}; open it at https://ui.perfetto.dev")
    return 0


def write_trace(source: str | Path, path: str | Path) -> None:
    """Write the trace of a record.

    Raises:
        RecordError: as `read_rollouts`.
    """
    events = trace_events(read_batches(source))
    first = next(events)  # a record that can't be read leaves no file
    with Path(path).open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n' + json.dumps(first))
        file.writelines(",\n" + json.dumps(event) for event in events)
        file.write("\n]}\n")


def trace_events(batches: Iterable[Sequence[RolloutRecord]]) -> Iterator[Event]:
    """Events in the trace event format, one rollout after the other."""
    origin_s: float | None = None
    end_s = 0.0
    for process, batch in enumerate(batches, start=1):
        started = batch[0]["started"]
        if origin_s is None and started is not None:
            origin_s = started
        # rollouts of which nobody knows when they began follow each other
        begin_s = end_s if started is None or origin_s is None else started - origin_s
        end_s = begin_s + max((s["end_s"] for r in batch for s in r["spans"]), default=0.0)
        yield _named("process_name", batch_name(batch[0]), process)
        yield _event("M", "process_sort_index", process, args={"sort_index": process})
        yield from _rows(batch, process, begin_s)
        yield from _counters(batch, process, begin_s)


def _rows(batch: Sequence[RolloutRecord], process: int, begin_s: float) -> Iterator[Event]:
    threads = itertools.count(1)
    for record in batch:
        for lane, spans in enumerate(_lanes(record["spans"])):
            thread = next(threads)
            name = record["id"] if lane == 0 else f"{record['id']}, side by side {lane}"
            yield _named("thread_name", name, process, thread)
            yield _event("M", "thread_sort_index", process, thread, args={"sort_index": thread})
            for span in spans:
                start, end = (_microseconds(begin_s + span[key]) for key in ("start_s", "end_s"))
                yield _event(
                    "X",
                    span["name"],
                    process,
                    thread,
                    cat=span["kind"],
                    ts=start,
                    dur=round(end - start, 3),
                    args={"id": record["id"], "stop_reason": record["stop_reason"]},
                )


def _lanes(spans: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Spans of one row must not overlap: each goes to the first row that is free by then."""
    lanes: list[list[dict[str, Any]]] = [[]]
    for span in sorted(spans, key=lambda span: span["start_s"]):
        free = (lane for lane in lanes if not lane or lane[-1]["end_s"] <= span["start_s"])
        lane = next(free, None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes


def _counters(batch: Sequence[RolloutRecord], process: int, begin_s: float) -> Iterator[Event]:
    """How many trajectories were with the model (active) and with tools (waiting)."""
    changes = sorted(
        change for record in batch for change in _changes(record["spans"])
    )  # time, kind, step
    counts = {"active": 0, "waiting": 0}
    for time_s, now in itertools.groupby(changes, key=lambda change: change[0]):
        for _, kind, step in now:
            counts[kind] += step
        yield _event(
            "C", "trajectories", process, ts=_microseconds(begin_s + time_s), args=dict(counts)
        )


def _changes(spans: Iterable[dict[str, Any]]) -> Iterator[tuple[float, str, int]]:
    for kind, counter in (("model", "active"), ("tool", "waiting"), ("user", "waiting")):
        own = [(span["start_s"], span["end_s"]) for span in spans if span["kind"] == kind]
        for start_s, end_s in merged(own):
            yield start_s, counter, 1
            yield end_s, counter, -1


def _event(phase: str, name: str, process: int, thread: int = 0, **fields: Any) -> Event:
    return {"ph": phase, "name": name, "pid": process, "tid": thread, **fields}


def _named(kind: str, name: str, process: int, thread: int = 0) -> Event:
    return _event("M", kind, process, thread, args={"name": name})


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
