"""Read recorded rollouts: streaming, joined with their amendments, every field checked.

Invariant: what is yielded is a whole record, whatever version wrote the line.
"""

import json
import warnings
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from agent_vllm.errors import EmptyRecordError, RecordError
from agent_vllm.record.parquet import read_parquet
from agent_vllm.record.schema import SCHEMA_VERSION, RolloutRecord, check_record
from agent_vllm.record.schema2 import upgraded
from agent_vllm.types import Trajectory


def read_rollouts(path: str | Path) -> Iterator[RolloutRecord]:
    """Yield the records of a file in order, each joined with its amendments.

    The file is read twice, first for amendments and then for records; one record is in memory at a
    time. A last line that a killed run left unfinished is skipped with a warning.

    Args:
        path: JSON lines, or what `agent-vllm export` made of them (`.parquet`). A folder means the
            `rollouts.jsonl` in it.

    Raises:
        FileNotFoundError: no such file.
        EmptyRecordError: no trajectory.
        RecordError: another schema, or a field that is missing or wrong; names the line.
    """
    path = record_path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist. A trainer with `record_rollouts=True` writes "
            "`output_dir/rollouts.jsonl`."
        )
    if path.suffix == ".parquet":
        return read_parquet(path)
    return _read_lines(path)


def record_path(path: str | Path) -> Path:
    """Return the file to read: `rollouts.jsonl` if `path` is the folder of a run."""
    path = Path(path)
    return path / "rollouts.jsonl" if path.is_dir() else path


def read_batches(path: str | Path) -> Iterator[list[RolloutRecord]]:
    """Yield the records of one rollout of one process at a time, in order."""
    key = itemgetter("session", "mode", "step", "rank", "rollout")
    for _, batch in groupby(read_rollouts(path), key):
        yield list(batch)


def batch_name(record: RolloutRecord) -> str:
    """Name the rollout that a record belongs to, such as "train step 3, rank 1"."""
    name = f"{record.mode} step {record.step}"
    for field, plain in (("rollout", 0), ("rank", 0), ("session", 1)):
        if record[field] != plain:
            name += f", {field} {record[field]}"
    return name


def to_trajectory(record: RolloutRecord) -> Trajectory:
    """Return the trajectory that was recorded."""
    return record.trajectory


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
        if record.id in lines_of:
            raise RecordError(
                f"{where} has id {record.id!r}, which line {lines_of[record.id]} has too. "
                "Were files put together? Read them one by one."
            )
        lines_of[record.id] = number
        yield record
    if not lines_of:
        raise EmptyRecordError(
            f"{path} holds no recorded trajectory. Did the run get to a rollout?"
        )


class _Amendments:
    """Find a record's amendments in the file. A malformed line is reported when it is read."""

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
    is_amendment = isinstance(value, dict) and value.get("schema") in (2, SCHEMA_VERSION)
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
        raise RecordError(f"{where} is not a recorded rollout: it has no `schema`.")
    if schema == 2 and "amends" not in value:
        return upgraded(value, where)
    if schema not in (2, SCHEMA_VERSION):
        raise RecordError(
            f"{where} has schema {schema!r}, this version reads 2 and {SCHEMA_VERSION}. Read it "
            "with the version that wrote it, or record the rollouts again."
        )
    return value
