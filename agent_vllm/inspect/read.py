"""Reading recorded rollouts back: streaming, joined with their amendments, every field checked.

Invariant: what is yielded has every field of schema 2, of the right type and in one length.
"""

import json
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from agent_vllm.errors import EmptyRecordError, RecordError
from agent_vllm.inspect.schema import SCHEMA_VERSION, RolloutRecord, check_record
from agent_vllm.types import (
    CallRecord,
    Segment,
    Span,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

BATCH_KEY = ("session", "mode", "step", "rank", "rollout")


def read_rollouts(path: str | Path) -> Iterator[RolloutRecord]:
    """The file's records in order, one at a time, each with what was amended to it later.

    The file is gone through twice, for the amendments and then for the records; only one record is
    held. A last line that a killed run left unfinished is skipped with a warning.

    Args:
        path: JSON lines, or what `agent-vllm export` made of them (`.parquet`).

    Raises:
        FileNotFoundError: no such file.
        EmptyRecordError: no trajectory.
        RecordError: another schema, or a field that is missing or wrong; names the line.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there. A trainer with `record_rollouts=True` writes "
            "`output_dir/rollouts.jsonl`."
        )
    if path.suffix == ".parquet":
        from agent_vllm.inspect.export import read_parquet

        return read_parquet(path)
    return _read_lines(path)


def read_batches(path: str | Path) -> Iterator[list[RolloutRecord]]:
    """The records of one rollout of one process at a time, in order."""
    for _, batch in groupby(read_rollouts(path), lambda record: [record[k] for k in BATCH_KEY]):
        yield list(batch)


def batch_name(record: RolloutRecord) -> str:
    """Which rollout a record belongs to, in words."""
    name = f"{record['mode']} step {record['step']}"
    for field, plain in (("rollout", 0), ("rank", 0), ("session", 1)):
        if record[field] != plain:
            name += f", {field} {record[field]}"
    return name


def to_trajectory(record: RolloutRecord) -> Trajectory:
    """The trajectory that was recorded.

    Raises:
        RecordError: sampled tokens and policy versions don't belong together.
    """
    return Trajectory(
        prompt_ids=record["prompt_ids"],
        turns=_turns(record),
        stop_reason=StopReason(record["stop_reason"]),
        messages=record["messages"],
        num_prompt_messages=record["num_prompt_messages"],
        thinking=record["thinking"],
        error=record["error"],
    )


def _turns(record: RolloutRecord) -> list[Turn]:
    """Put what the record keeps in lists side by side back into turns."""
    flat = Trajectory.from_segments(
        prompt_ids=[], segments=_segments(record), stop_reason=StopReason.ANSWERED
    )
    results = deque(ToolResult(**cast(Any, result)) for result in record["tool_results"])
    spans = deque(Span(**span) for span in record["spans"])
    drafted = deque(
        call["function"]
        for message in record["messages"][record["num_prompt_messages"] :]
        for call in message.get("tool_calls") or []
    )
    turns = []
    for index, turn in enumerate(flat.turns):
        text = record["turn_outputs"][index] if index < len(record["turn_outputs"]) else ""
        span = spans.popleft() if spans and spans[0].kind == "model" else None
        calls, user_span = [], None
        while spans and spans[0].kind != "model":
            waited = spans.popleft()
            if results and waited.kind == "tool" and results[0].name == waited.name:
                calls.append(_call_record(results.popleft(), waited, drafted))
            else:
                user_span = replace(waited, kind="user")
        turns.append(replace(turn, text=text, span=span, calls=calls, user_span=user_span))
    if turns and results:
        rest = [_call_record(result, None, drafted) for result in results]
        turns[-1] = replace(turns[-1], calls=[*turns[-1].calls, *rest])
    return turns


def _call_record(
    result: ToolResult, span: Span | None, drafted: deque[dict[str, Any]]
) -> CallRecord:
    """The call as the messages have it; one that could not be read is in none of them."""
    is_drafted = bool(drafted) and drafted[0].get("name") == result.name
    arguments = drafted.popleft().get("arguments") if is_drafted else None
    call = ToolCall(name=result.name, arguments=arguments)
    return CallRecord(call=call, result=result, span=span)


def _segments(record: RolloutRecord) -> list[Segment]:
    """Runs of one mask value: turns are never neighbours, an observation stands between them."""
    columns = zip(
        record["completion_mask"], record["completion_ids"], record["logprobs"], strict=True
    )
    runs = [(mask, list(run)) for mask, run in groupby(columns, lambda column: column[0])]
    versions = list(record["policy_versions"])
    if sum(mask for mask, _ in runs) != len(versions):
        raise RecordError(
            f"Record {record['id']} has {sum(mask for mask, _ in runs)} sampled turns and "
            f"{len(versions)} policy versions; there must be one for each turn."
        )
    segments = []
    for mask, run in runs:
        token_ids, logprobs = [token for _, token, _ in run], [logprob for *_, logprob in run]
        segments.append(
            Segment(token_ids=token_ids, logprobs=logprobs, policy_version=versions.pop(0))
            if mask
            else Segment(token_ids=token_ids)
        )
    return segments


# ---- lines ----


def _read_lines(path: Path) -> Iterator[RolloutRecord]:
    amendments = _Amendments(path)
    lines_of: dict[str, int] = {}
    for number, line in _numbered(path):
        where = f"{path}:{number}"
        value = _value(line, where)
        if value is None or "amends" in value:
            continue
        record = check_record(value | amendments.of(value.get("id")), where)
        if record["id"] in lines_of:
            raise RecordError(
                f"{where} has id {record['id']!r}, which line {lines_of[record['id']]} has too. "
                "Were files put together? Read them one by one."
            )
        lines_of[record["id"]] = number
        yield record
    if not lines_of:
        raise EmptyRecordError(
            f"{path} holds no recorded trajectory. Did the run get to a rollout?"
        )


class _Amendments:
    """Where in the file which record is amended; a wrong line is named when its turn comes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[str, list[int]] = {}
        offset = 0
        for _, line in _numbered(path):
            if b'"amends"' in line and (amended := _amended(line)) is not None:
                self._offsets.setdefault(amended, []).append(offset)
            offset += len(line)

    def of(self, record_id: Any) -> dict[str, Any]:
        offsets = self._offsets.get(str(record_id), ())
        joined: dict[str, Any] = {}
        if offsets:
            with self._path.open("rb") as file:
                for offset in offsets:
                    file.seek(offset)
                    joined |= json.loads(file.readline())
        return {k: v for k, v in joined.items() if k not in ("schema", "amends", "session")}


def _amended(line: bytes) -> str | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_amendment = isinstance(value, dict) and value.get("schema") == SCHEMA_VERSION
    return str(value["amends"]) if is_amendment and "amends" in value else None


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from enumerate(file, start=1)


def _value(line: bytes, where: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            warnings.warn(
                f"{where} is cut off, as by a run that was killed; it is skipped.", stacklevel=3
            )
            return None
        raise RecordError(f"{where} is not JSON: {error}") from error
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema is None:
        raise RecordError(f"{where} is no recorded rollout: it has no `schema`.")
    if schema != SCHEMA_VERSION:
        raise RecordError(
            f"{where} has schema {schema!r}, this version reads {SCHEMA_VERSION}. Read it with the "
            "version that wrote it, or record the rollouts again."
        )
    return value
