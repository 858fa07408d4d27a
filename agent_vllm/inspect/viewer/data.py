"""Turn a record into what the page shows: a row for the list and a body per trajectory.

Owns the conversion of a record's fields to strings and numbers that a browser can show as they are.
Invariant: every token column of a body has the record's own values and length, and whatever is left
out is named in a note.
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

from agent_vllm.chat import TEXT_ROLE
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
class PageData:
    """Hold what the page shows; the newest `limit` trajectories have a row and a body.

    Attributes:
        rows: one per trajectory, in the record's order.
        bodies: JSON text by trajectory id.
        steps: figures per step and mode, over all trajectories of the record.
        num_trajectories: number in the whole record.
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
        """Return everything but the bodies."""
        return {
            "name": self.name,
            "rows": self.rows,
            "steps": self.steps,
            "num_trajectories": self.num_trajectories,
            "notes": self.notes,
        }


def read_page_data(path: Path, limit: int) -> PageData:
    """Read the newest `limit` trajectories of a record, one at a time.

    If a line after the first trajectory is wrong, the data ends there, with a note.

    Raises:
        OSError: the file can't be read.
        EmptyRecordError: the file holds no trajectory.
        RecordError: the file is not a record of rollouts, or has another schema.
    """
    data = PageData(name=path.name)
    kept: deque[Shown] = deque(maxlen=limit)
    steps = _Steps()
    with warnings.catch_warnings(record=True, action="always") as warned:
        try:
            for record in read_rollouts(path):
                kept.append(_shown(record))
                steps.add(kept[-1][0])
                data.num_trajectories += 1
        except ValueError as error:
            if not kept:
                raise
            data.notes.append(f"Read up to here: {error}")
    data.notes += [str(warning.message) for warning in warned]
    data.rows = [row for row, _ in kept]
    data.bodies = {row["id"]: to_json(body) for row, body in kept}
    data.steps = steps.figures()
    _note_what_is_left_out(data)
    return data


def to_json(value: Any) -> str:
    """Return JSON that stays data inside an HTML script element: ASCII only, no `<`."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# ---- one trajectory ----


def _shown(record: RolloutRecord) -> Shown:
    try:
        return _row(record), _body(record)
    except (AttributeError, TypeError, OverflowError, RecursionError) as error:
        # a message's calls are not objects; numbers too large, values nested too deep
        raise RecordError(f"Record {record.id} can't be shown: {error!r}.") from error


def _row(record: RolloutRecord) -> dict[str, Any]:
    """Return what the list, the timeline and the charts need."""
    prompt, completion = _split(record)
    trajectory = record.trajectory
    statuses = Counter(call.result.status for call in trajectory.calls)
    rewards = {name: _number(value) for name, value in record.rewards.items()}
    known = [value for value in rewards.values() if value is not None]
    asked = [message for message in prompt if message.get("role") in ("user", TEXT_ROLE)]
    answers = [message for message in completion if message.get("role") == "assistant"]
    return {
        **{name: record[name] for name in _AS_RECORDED},
        **{name: _number(record[name]) for name in ("temperature", "advantage", "time")},
        "seed": _text(record.seed),
        "rewards": rewards,
        "reward": _number(sum(known)) if known else None,
        "num_turns": len(answers),
        "num_calls": statuses.total(),
        "num_failed": statuses["failed"],
        "num_invalid": statuses["invalid"],
        "num_prompt_tokens": len(record.prompt_ids),
        "num_completion_tokens": sum(len(s.token_ids) for s in trajectory.segments),
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "spans": [
            [span.kind, span.name, _number(span.start_s) or 0, _number(span.end_s) or 0]
            for span in trajectory.spans
        ],
        "question": _preview(asked[-1]) if asked else "",
    }


def _body(record: RolloutRecord) -> dict[str, Any]:
    """Return what is shown when the trajectory is opened; token columns in base64."""
    prompt, completion = _split(record)
    trajectory = record.trajectory
    learner_logprobs = record.learner_logprobs
    contents = {_text(message.get("content")) for message in completion}
    return {
        "prompt": [_message(message) for message in prompt],
        "completion": [_message(message) for message in completion],
        # a text that a message shows already is left out
        "turn_outputs": [_unless_in(contents, turn.text) for turn in record.turns],
        "tool_results": [
            {
                "name": call.result.name,
                "content": _unless_in(contents, call.result.content),
                "status": call.result.status,
            }
            for call in trajectory.calls
        ],
        "row": {name: _text(value) for name, value in record.row.items()},
        "prompt_ids": _column("i", record.prompt_ids),
        "completion_ids": _column("i", trajectory.completion_ids),
        "completion_mask": _column("B", trajectory.completion_mask),
        "logprobs": _column("f", trajectory.logprobs),
        "learner_logprobs": None if learner_logprobs is None else _column("f", learner_logprobs),
        "token_texts": record.token_texts,
    }


def _split(record: RolloutRecord) -> tuple[Sequence[Message], Sequence[Message]]:
    trajectory = record.trajectory
    return record.messages[: record.num_prompt_messages], trajectory.completion_messages


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
    """Return a string as it is, everything else as JSON in the record's own digits."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, indent=2, ensure_ascii=False)


def _unless_in(texts: Container[str | None], text: str | None) -> str | None:
    return None if text in texts else text


def _preview(message: Message) -> str:
    text = _text(message.get("content")) or ""
    return " ".join(text[: 4 * _PREVIEW_CHARS].split())[:_PREVIEW_CHARS]


def _number(value: float | None) -> float | None:
    """Return a number that JSON has; None for NaN and infinities."""
    return value if value is not None and math.isfinite(value) else None


def _column(typecode: str, values: Iterable[float]) -> str:
    """Pack numbers as little-endian bytes in base64: i int32 (-1: redacted), B uint8, f float32."""
    column = array(typecode, values)
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode("ascii")


# ---- what several trajectories share ----


class _Steps:
    """Collect figures by step and mode: rewards and stop reasons."""

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
        """Return them in order of steps; "" names the sum of all reward functions."""
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


def _note_what_is_left_out(data: PageData) -> None:
    num_left_out = data.num_trajectories - len(data.rows)
    if num_left_out:
        data.notes.append(
            f"The newest {len(data.rows)} of {data.num_trajectories} trajectories are shown; "
            "the curves are over all of them. Use --limit for more."
        )
