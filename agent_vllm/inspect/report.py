"""What the viewer's page shows of a record: a row for the list and a body for each trajectory.

Owns the way from a record's fields to strings and numbers that a browser can show as they are; the
page knows nothing of the record's schema. Invariant: every token column of a body has the record's
own values and length, and whatever is left out is said in a note.
"""

import base64
import json
import math
import statistics
import sys
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2

_PREVIEW_CHARS = 160
_REQUIRED = ("id", "messages", "prompt_ids", "completion_ids", "completion_mask", "logprobs")
_COLUMNS = ("completion_ids", "completion_mask", "logprobs", "learner_logprobs")
_MAX_NOTES = 20

Record = Mapping[str, Any]


@dataclass
class Report:
    """A record as the page shows it; the newest `limit` trajectories have a row and a body.

    Attributes:
        rows: one a trajectory, in the record's order.
        bodies: JSON text by trajectory id.
        steps: figures of each step and mode, over every trajectory of the record.
        num_trajectories: of the record.
        notes: what was left out, and why.
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    bodies: dict[str, str] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    num_trajectories: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def index(self) -> dict[str, Any]:
        """All but the bodies."""
        return {
            "name": self.name,
            "rows": self.rows,
            "steps": self.steps,
            "num_trajectories": self.num_trajectories,
            "notes": self.notes,
        }


def read_report(path: Path, limit: int) -> Report:
    """The report of a record's newest `limit` trajectories; the file is read line by line.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is no record of rollouts, or of another schema.
    """
    report = Report(name=path.name)
    kept: deque[_Entry] = deque(maxlen=limit)
    by_id: dict[str, _Entry] = {}
    steps = _Steps()
    try:
        for record in read_rollouts(path, report.notes):
            if "amends" in record:
                _amend(by_id.get(record["amends"]), record, report.notes)
            elif (entry := _entry(record, by_id, report.notes)) is not None:
                steps.add(entry.row)
                report.num_trajectories += 1
                if len(kept) == limit:
                    del by_id[kept[0].row["id"]]
                kept.append(entry)
                by_id[entry.row["id"]] = entry
    except ValueError as error:
        if not kept:
            raise
        report.notes.append(f"Read up to here: {error}")
    report.rows = [entry.row for entry in kept]
    report.bodies = {entry.row["id"]: to_json(entry.body) for entry in kept}
    report.steps = steps.figures()
    _note_what_is_left_out(report)
    return report


def read_rollouts(path: Path, notes: list[str]) -> Iterator[Record]:
    """The record's lines, one at a time; a line that is not whole is noted and left out.

    Raises:
        ValueError: a line of another schema; names it.
    """
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if number == 1 and not line.startswith("{"):
                    raise ValueError(f"{path} is no record of rollouts: {error}.") from error
                notes.append(
                    f"Line {number} is not whole JSON and is left out: the run was stopped there, "
                    "or is still writing it."
                )
                continue
            if not isinstance(record, dict) or "schema" not in record:
                raise ValueError(f"{path}:{number} is no recorded rollout: it names no schema.")
            if record["schema"] != SCHEMA_VERSION:
                raise ValueError(
                    f"{path}:{number} has schema {record['schema']!r}, this version reads "
                    f"{SCHEMA_VERSION}. Use the version that wrote it."
                )
            yield record


def to_json(value: Any) -> str:
    """JSON that stays data inside an HTML script element: ASCII alone, no `<`."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# ---- one trajectory ----


class _Entry:
    """A trajectory's row and body; the learner's logprobs may come later."""

    def __init__(self, record: Record) -> None:
        self.row = _row(record)
        self.body = _body(record)

    def amend(self, learner_logprobs: Sequence[float | None]) -> None:
        self.body["learner_logprobs"] = _floats(learner_logprobs)


def _entry(record: Record, known: Mapping[str, object], notes: list[str]) -> _Entry | None:
    """None, and a note, where the record does not hold together."""
    problem = _problem_with(record, known)
    if problem is None:
        try:
            return _Entry(record)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            problem = f"Trajectory {record['id']} is left out: {error!r}."
    notes.append(problem)
    return None


def _problem_with(record: Record, known: Mapping[str, object]) -> str | None:
    missing = [name for name in _REQUIRED if record.get(name) is None]
    if missing:
        return f"A trajectory without {', '.join(missing)} is left out."
    if record["id"] in known:
        return f"A second trajectory {record['id']} is left out."
    lengths = {name: len(record[name]) for name in _COLUMNS if record.get(name) is not None}
    if len(set(lengths.values())) == 1:
        return None
    listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
    return f"Trajectory {record['id']} is left out: its columns differ in length ({listed})."


def _amend(entry: _Entry | None, record: Record, notes: list[str]) -> None:
    """Later fields of an earlier trajectory; one that is not kept any more needs none."""
    learner_logprobs = record.get("learner_logprobs")
    if entry is None or learner_logprobs is None:
        return
    if len(learner_logprobs) != entry.row["num_completion_tokens"]:
        notes.append(
            f"The learner's logprobs of trajectory {entry.row['id']} are left out: "
            f"{len(learner_logprobs)} for {entry.row['num_completion_tokens']} tokens."
        )
        return
    entry.amend(learner_logprobs)


def _row(record: Record) -> dict[str, Any]:
    """What the list, the timeline and the charts need."""
    prompt, completion = _split(record)
    statuses = Counter(result.get("status") for result in record.get("tool_results") or [])
    rewards = {name: _number(value) for name, value in (record.get("rewards") or {}).items()}
    known = [value for value in rewards.values() if value is not None]
    asked = [message for message in prompt if message.get("role") == "user"]
    answers = [message for message in completion if message.get("role") == "assistant"]
    return {
        "id": str(record["id"]),
        "step": _number(record.get("step")),
        "mode": record.get("mode"),
        "rank": _number(record.get("rank")),
        "session": _number(record.get("session")) or 1,
        "rollout": _number(record.get("rollout")) or 0,
        "group": _number(record.get("group")),
        "generation": _number(record.get("generation")),
        "seed": _text(record.get("seed")),
        "temperature": _number(record.get("temperature")),
        "tools": [str(name) for name in record.get("tools") or []],
        "rewards": rewards,
        "reward": sum(known) if known else None,
        "advantage": _number(record.get("advantage")),
        "trained": record.get("trained"),
        "stop_reason": record.get("stop_reason") or "unknown",
        "error": _text(record.get("error")),
        "thinking": record.get("thinking"),
        "policy_versions": record.get("policy_versions") or [],
        "time": _text(record.get("time")),
        "num_turns": len(answers),
        "num_calls": sum(statuses.values()),
        "num_failed": statuses["failed"],
        "num_invalid": statuses["invalid"],
        "num_prompt_tokens": len(record["prompt_ids"]),
        "num_completion_tokens": len(record["completion_ids"]),
        "num_sampled_tokens": sum(record["completion_mask"]),
        "spans": [
            [span["kind"], _text(span["name"]), _number(span["start_s"]), _number(span["end_s"])]
            for span in record.get("spans") or []
        ],
        "question": _preview(asked[-1]) if asked else "",
    }


def _body(record: Record) -> dict[str, Any]:
    """What is looked at when the trajectory is opened; token columns in base64."""
    prompt, completion = _split(record)
    learner_logprobs = record.get("learner_logprobs")
    contents = {_text(message.get("content")) for message in completion}
    return {
        "prompt": [_message(message) for message in prompt],
        "completion": [_message(message) for message in completion],
        # texts that a message shows already are not said twice
        "turn_outputs": [
            _unless_in(contents, _text(output)) for output in record.get("turn_outputs") or []
        ],
        "tool_results": [
            {
                "name": _text(result.get("name")),
                "status": _text(result.get("status")),
                "content": _unless_in(contents, _text(result.get("content"))),
            }
            for result in record.get("tool_results") or []
        ],
        "prompt_ids": _column("I", record["prompt_ids"]),
        "completion_ids": _column("I", record["completion_ids"]),
        "completion_mask": _column("B", record["completion_mask"]),
        "logprobs": _floats(record["logprobs"]),
        "learner_logprobs": None if learner_logprobs is None else _floats(learner_logprobs),
        "token_texts": record.get("token_texts") or {},
    }


def _split(record: Record) -> tuple[Sequence[Record], Sequence[Record]]:
    num_prompt = record.get("num_prompt_messages") or 0
    return record["messages"][:num_prompt], record["messages"][num_prompt:]


def _message(message: Record) -> dict[str, Any]:
    return {
        "role": _text(message.get("role")),
        "name": _text(message.get("name")),
        "content": _text(message.get("content")),
        "reasoning": _text(message.get("reasoning_content")),
        "calls": [_call(call) for call in message.get("tool_calls") or []],
    }


def _call(call: Record) -> dict[str, Any]:
    function = call.get("function") or call
    return {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))}


def _text(value: Any) -> str | None:
    """Strings as they are, everything else as JSON in the record's own digits."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, indent=2, ensure_ascii=False)


def _unless_in(texts: Container[str | None], text: str | None) -> str | None:
    return None if text in texts else text


def _preview(message: Record) -> str:
    text = _text(message.get("content")) or ""
    return " ".join(text[: 4 * _PREVIEW_CHARS].split())[:_PREVIEW_CHARS]


def _number(value: Any) -> float | None:
    """A number that JSON has; none for NaN, infinities and what is no number."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if is_number else None


def _column(typecode: str, values: Iterable[float]) -> str:
    """Numbers as little-endian bytes in base64: I uint32, B uint8, f float32."""
    column = array(typecode, values)
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode("ascii")


def _floats(values: Iterable[float | None]) -> str:
    return _column("f", (math.nan if value is None else value for value in values))


# ---- what several trajectories share ----


class _Steps:
    """Figures by step and mode: rewards and what ended the trajectories."""

    def __init__(self) -> None:
        self._rewards: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._stops: dict[tuple, Counter] = defaultdict(Counter)

    def add(self, row: Mapping[str, Any]) -> None:
        key = (row["step"], row["mode"])
        self._stops[key][row["stop_reason"]] += 1
        for name, value in (row["rewards"] | {"": row["reward"]}).items():
            if value is not None:
                self._rewards[key][name].append(value)

    def figures(self) -> list[dict[str, Any]]:
        """In order of steps; "" names the sum of all reward functions."""
        keys = sorted(
            (key for key in self._stops if key[0] is not None), key=lambda k: (k[0], str(k[1]))
        )
        return [
            {
                "step": step,
                "mode": mode,
                "num": self._stops[step, mode].total(),
                "stop_reasons": self._stops[step, mode],
                "rewards": {
                    name: {"mean": statistics.fmean(values), "std": statistics.pstdev(values)}
                    for name, values in self._rewards[step, mode].items()
                },
            }
            for step, mode in keys
        ]


def _note_what_is_left_out(report: Report) -> None:
    if len(report.notes) > _MAX_NOTES:
        num_more = len(report.notes) - _MAX_NOTES
        report.notes[_MAX_NOTES:] = [f"And {num_more} more notes like these."]
    num_left_out = report.num_trajectories - len(report.rows)
    if num_left_out:
        report.notes.append(
            f"The newest {len(report.rows)} of {report.num_trajectories} trajectories are here; "
            "the curves are over all. Use --limit for more."
        )
