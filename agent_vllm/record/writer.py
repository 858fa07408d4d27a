"""Write trajectories as JSON lines; `schema.py` has the format, `reader.py` reads it back.

A line is a record (one trajectory) or an amendment (what became known about a record later).
Invariant: the file has one writer, and ends with a whole line or with one that was cut off when its
writer was killed; the next writer removes that one.
"""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, cast

from transformers import PreTrainedTokenizerBase

from agent_vllm.errors import RecordError
from agent_vllm.record.schema import (
    SCHEMA_VERSION,
    RolloutRecord,
    RunFields,
    check_record,
    to_json,
)
from agent_vllm.types import Trajectory

_READABLE = (2, SCHEMA_VERSION)  # schemas of a file that may be appended to
_BEGINNINGS = (b'{"schema": 2,', b'{"schema":3,')  # of its lines

Redact = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Gets the JSON object that is to be written and returns what is written instead, or None."""


class RolloutRecorder:
    """Append trajectories to a file. Each line is flushed, so a killed run leaves whole lines.

    Args:
        path: the file; its folders are made. An existing record is appended to, in a session of
            its own. A line that a killed run left unfinished is removed.
        tokenizer: decodes the tokens, so that readers need none. Without it `token_texts` is empty.
        redact: gets each record as the dict that would be written, and returns what is written
            instead; None leaves the trajectory out. See `redact_secrets`.

    Raises:
        RecordError: the file exists and is not a record of this schema, or another recorder
            writes to it.
        OSError: the file can't be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        redact: Redact | None = None,
    ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)
        try:
            _lock(self._file.fileno(), self.path)
            self.session = _next_session(self.path)
        except BaseException:
            self._file.close()
            raise
        self._pieces = None if tokenizer is None else _Pieces(tokenizer)
        self._redact = redact
        self._num_written: Counter[str] = Counter()

    def write(self, trajectory: Trajectory, **fields: Any) -> str | None:
        """Append one record.

        Args:
            fields: what the run knows about the trajectory, by the names of `RunFields`.

        Returns:
            The record's id, unique in the file; None if `redact` left it out.

        Raises:
            RecordError: `redact` returned something that is not a record.
            OSError: the line can't be written; the file is as it was before.
        """
        record = self._record(trajectory, _known(fields))
        line = to_json({"schema": SCHEMA_VERSION, **record.model_dump(by_alias=True)})
        if self._redact is not None:
            redacted = self._redact(json.loads(line))
            if redacted is None:
                return None
            check_record(redacted, f"Record {record.id}, redacted")
            line = to_json(redacted)
        self._write_line(line)
        return record.id

    def amend(self, record_id: str, **fields: Any) -> None:
        """Append what became known about a written record; readers join the two."""
        amendment = {"schema": SCHEMA_VERSION, "amends": record_id, "session": self.session}
        self._write_line(to_json({**amendment, **_known(fields)}))

    def close(self) -> None:
        """Release the file; further calls do nothing."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # forked workers may hold the file open
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, trajectory: Trajectory, fields: Mapping[str, Any]) -> RolloutRecord:
        run = RunFields(**fields)
        ids = set(trajectory.prompt_ids).union(*(s.token_ids for s in trajectory.segments))
        return RolloutRecord(
            **dict(run),
            id=self._next_id(run),
            session=self.session,
            time=time.time(),
            stop_reason=trajectory.stop_reason,
            error=trajectory.error,
            thinking=trajectory.thinking,
            messages=trajectory.messages,
            num_prompt_messages=trajectory.num_prompt_messages,
            prompt_ids=trajectory.prompt_ids,
            turns=trajectory.turns,
            token_texts={} if self._pieces is None else self._pieces.of(ids),
        )

    def _next_id(self, run: RunFields) -> str:
        place = f"{run.mode}-{run.step}-{run.rank}"
        number = self._num_written[place]
        self._num_written[place] += 1
        return f"{place}-{number}" if self.session == 1 else f"{place}-{number}-{self.session}"

    def _write_line(self, line: str) -> None:
        # a lone surrogate, which a model can write in a call, becomes JSON's own escape
        left = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        end = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(end)
            raise


class _Pieces:
    """Decode each id once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._items: dict[int, tuple[str, str]] = {}

    def of(self, token_ids: set[int]) -> dict[str, str]:
        for token in token_ids - self._items.keys():
            self._items[token] = (str(token), cast(str, self._tokenizer.decode([token])))
        return dict([self._items[token] for token in token_ids])


def _known(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = sorted(fields.keys() - RunFields.model_fields.keys())
    if unknown:
        raise TypeError(
            f"A record has no fields {unknown}. They are: {sorted(RunFields.model_fields)}."
        )
    return fields


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecordError(
            f"{path} is written by another recorder. Close that one (`trainer.close()`), or give "
            "each run a folder of its own."
        ) from None
    except OSError:  # a file system without locks
        return


def _next_session(path: Path) -> int:
    """Return the number of writers so far plus one; remove the end of a line that was cut off."""
    with path.open("rb") as file:
        first = last = b""
        end = 0
        for line in file:
            first = first or line
            if line.endswith(b"\n"):
                last, end = line, end + len(line)
    if not first or (end == 0 and first.startswith(_BEGINNINGS)):  # killed within its first line
        session = 0
    else:
        session = _session_of(first, path) and _session_of(last, path)
    if end < path.stat().st_size:
        os.truncate(path, end)
    return session + 1


def _session_of(line: bytes, path: Path) -> int:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, Mapping) or value.get("schema") not in _READABLE:
        raise RecordError(
            f"{path} exists and is not a record of schema {SCHEMA_VERSION}. Move it away, or "
            "choose another path (the trainer's is `output_dir/rollouts.jsonl`)."
        )
    return value["session"]
