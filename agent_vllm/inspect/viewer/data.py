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
import warnings
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_vllm.errors import RecordError
from agent_vllm.record import RolloutRecord, read_rollouts

_PREVIEW_CHARS = 160
_AS_RECORDED = (
    "id",
    "session",
    "mode",
    "step",
    "rank",
    "rollout",
    "group",
    "generation",
    "tools",
    "trained",
    "stop_reason",
    "error",
    "thinking",
    "policy_versions",
)

Message = Mapping[str, Any]
Shown = tuple[dict[str, Any], dict[str, Any]]  # row, body


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
    """The report of a record's newest `limit` trajectories; one at a time is read.

    What is wrong behind the first trajectory is a note, and the report ends there.

    Raises:
        OSError: the file can't be read.
        EmptyRecordError: the file holds no trajectory.
        RecordError: the file is no record of rollouts, or of another schema.
    """
    report = Report(name=path.name)
    kept: deque[Shown] = deque(maxlen=limit)
    steps = _Steps()
    with warnings.catch_warnings(record=True, action="always") as warned:
        try:
            for record in read_rollouts(path):
                kept.append(_shown(record))
                steps.add(kept[-1][0])
                report.num_trajectories += 1
        except ValueError as error:
            if not kept:
                raise
            report.notes.append(f"Read up to here: {error}")
    report.notes += [str(warning.message) for warning in warned]
    report.rows = [row for row, _ in kept]
    report.bodies = {row["id"]: to_json(body) for row, body in kept}
    report.steps = steps.figures()
    _note_what_is_left_out(report)
    return report


def to_json(value: Any) -> str:
    """JSON that stays data inside an HTML script element: ASCII alone, no `<`."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# ---- one trajectory ----


def _shown(record: RolloutRecord) -> Shown:
    try:
        return _row(record), _body(record)
    except (AttributeError, TypeError, OverflowError, RecursionError) as error:
        # calls of a message that are no objects; numbers too large, values nested too deep
        raise RecordError(f"Record {record['id']} can't be shown: {error!r}.") from error


def _row(record: RolloutRecord) -> dict[str, Any]:
    """What the list, the timeline and the charts need."""
    prompt, completion = _split(record)
    statuses = Counter(result["status"] for result in record["tool_results"])
    rewards = {name: _number(value) for name, value in record["rewards"].items()}
    known = [value for value in rewards.values() if value is not None]
    asked = [message for message in prompt if message.get("role") == "user"]
    answers = [message for message in completion if message.get("role") == "assistant"]
    return {
        **{name: record[name] for name in _AS_RECORDED},
        **{name: _number(record[name]) for name in ("temperature", "advantage", "time")},
        "seed": _text(record["seed"]),
        "rewards": rewards,
        "reward": _number(sum(known)) if known else None,
        "num_turns": len(answers),
        "num_calls": statuses.total(),
        "num_failed": statuses["failed"],
        "num_invalid": statuses["invalid"],
        "num_prompt_tokens": len(record["prompt_ids"]),
        "num_completion_tokens": len(record["completion_ids"]),
        "num_sampled_tokens": sum(record["completion_mask"]),
        "spans": [
            [span["kind"], span["name"], _number(span["start_s"]) or 0, _number(span["end_s"]) or 0]
            for span in record["spans"]
        ],
        "question": _preview(asked[-1]) if asked else "",
    }


def _body(record: RolloutRecord) -> dict[str, Any]:
    """What is looked at when the trajectory is opened; token columns in base64."""
    prompt, completion = _split(record)
    learner_logprobs = record["learner_logprobs"]
    contents = {_text(message.get("content")) for message in completion}
    return {
        "prompt": [_message(message) for message in prompt],
        "completion": [_message(message) for message in completion],
        # texts that a message shows already are not said twice
        "turn_outputs": [_unless_in(contents, output) for output in record["turn_outputs"]],
        "tool_results": [
            result | {"content": _unless_in(contents, result["content"])}
            for result in record["tool_results"]
        ],
        "row": {name: _text(value) for name, value in record["row"].items()},
        "prompt_ids": _column("i", record["prompt_ids"]),
        "completion_ids": _column("i", record["completion_ids"]),
        "completion_mask": _column("B", record["completion_mask"]),
        "logprobs": _column("f", record["logprobs"]),
        "learner_logprobs": None if learner_logprobs is None else _column("f", learner_logprobs),
        "token_texts": record["token_texts"],
    }


def _split(record: RolloutRecord) -> tuple[Sequence[Message], Sequence[Message]]:
    num_prompt = record["num_prompt_messages"]
    return record["messages"][:num_prompt], record["messages"][num_prompt:]


def _message(message: Message) -> dict[str, Any]:
    return {
        "role": _text(message.get("role")),
        "name": _text(message.get("name")),
        "content": _text(message.get("content")),
        "reasoning": _text(message.get("reasoning_content")),
        "calls": [_call(call) for call in message.get("tool_calls") or []],
    }


def _call(call: Message) -> dict[str, Any]:
    function = call.get("function") or call
    return {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))}


def _text(value: Any) -> str | None:
    """Strings as they are, everything else as JSON in the record's own digits."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, indent=2, ensure_ascii=False)


def _unless_in(texts: Container[str | None], text: str | None) -> str | None:
    return None if text in texts else text


def _preview(message: Message) -> str:
    text = _text(message.get("content")) or ""
    return " ".join(text[: 4 * _PREVIEW_CHARS].split())[:_PREVIEW_CHARS]


def _number(value: float | None) -> float | None:
    """A number that JSON has; none for NaN and infinities."""
    return value if value is not None and math.isfinite(value) else None


def _column(typecode: str, values: Iterable[float]) -> str:
    """Numbers as little-endian bytes in base64: i int32 (-1: redacted), B uint8, f float32."""
    column = array(typecode, values)
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode("ascii")


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
            for step, mode in sorted(self._stops)
        ]


def _note_what_is_left_out(report: Report) -> None:
    num_left_out = report.num_trajectories - len(report.rows)
    if num_left_out:
        report.notes.append(
            f"The newest {len(report.rows)} of {report.num_trajectories} trajectories are here; "
            "the curves are over all. Use --limit for more."
        )
