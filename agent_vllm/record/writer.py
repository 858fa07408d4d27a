"""Writing trajectories as JSON lines; `schema.py` has the format, `read.py` reads it back.

A line is a record (one trajectory) or an amendment (what became known of a record later).
Invariant: a line is written whole or cut off at the end of the file, where the next writer takes it
away.
"""

import json
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

_BEGINNING = b'{"schema": 2, '

_DEFAULTS = RunFields(
    mode="rollout",
    step=0,
    rank=0,
    rollout=0,
    group=0,
    generation=0,
    seed=None,
    temperature=None,
    max_model_len=None,
    started=None,
    tools=[],
    rewards={},
    advantage=None,
    trained=False,
    learner_logprobs=None,
    row={},
)

Redact = Callable[[RolloutRecord], RolloutRecord | None]


class RolloutRecorder:
    """Appends trajectories to a file; each line is flushed, so a killed run leaves whole lines.

    Args:
        path: made with its folders. A record that is there is appended to, in a session of its
            own; a line that a killed run left unfinished is taken away.
        tokenizer: spells the tokens, so that readers need none; without it `token_texts` is empty.
        redact: gets each record as it would be written, and returns what is written instead; None
            leaves the trajectory out. See `redact_secrets`.

    Raises:
        RecordError: the file is there and is no record of this schema.
        OSError: the folder can't be written.
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
        self.session = _next_session(self.path)
        # a lone surrogate, which a model can write in a call, becomes JSON's own escape
        self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        self._pieces = None if tokenizer is None else _Pieces(tokenizer)
        self._redact = redact
        self._num_written: Counter[str] = Counter()

    def write(self, trajectory: Trajectory, **fields: Any) -> str | None:
        """Append one record.

        Args:
            fields: what the run knows of the trajectory, by the names of `RunFields`.

        Returns:
            The record's id, unique in the file; None where `redact` left it out.
        """
        record = self._record(trajectory, fields)
        if self._redact is not None:
            redacted = self._redact(json.loads(to_json(record)))
            if redacted is None:
                return None
            check_record(redacted, f"Record {record['id']}, redacted")
            record = redacted
        self._write_line(record)
        return record["id"]

    def amend(self, record_id: str, **fields: Any) -> None:
        """Append what became known of a record that is written; readers join the two."""
        self._write_line(
            {
                "schema": SCHEMA_VERSION,
                "amends": record_id,
                "session": self.session,
                **_known(fields),
            }
        )

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, trajectory: Trajectory, fields: Mapping[str, Any]) -> RolloutRecord:
        run: Any = {**_DEFAULTS, **_known(fields)}
        ids = {*trajectory.prompt_ids, *trajectory.completion_ids}
        return RolloutRecord(
            schema=SCHEMA_VERSION,
            id=self._next_id(run),
            session=self.session,
            time=time.time(),
            **run,
            **trajectory_record(trajectory),
            token_texts={} if self._pieces is None else self._pieces.of(ids),
        )

    def _next_id(self, run: Mapping[str, Any]) -> str:
        place = f"{run['mode']}-{run['step']}-{run['rank']}"
        number = self._num_written[place]
        self._num_written[place] += 1
        return f"{place}-{number}" if self.session == 1 else f"{place}-{number}-{self.session}"

    def _write_line(self, line: Mapping[str, Any]) -> None:
        self._file.write(to_json(line) + "\n")
        self._file.flush()


class _Pieces:
    """Each id's text, decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._items: dict[int, tuple[str, str]] = {}

    def of(self, token_ids: set[int]) -> dict[str, str]:
        for token in token_ids - self._items.keys():
            self._items[token] = (str(token), cast(str, self._tokenizer.decode([token])))
        return dict([self._items[token] for token in token_ids])


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory in JSON's types, tokens flat: ids, mask and logprobs of one length."""
    return {
        "stop_reason": trajectory.stop_reason.value,
        "error": trajectory.error,
        "thinking": trajectory.thinking,
        "messages": trajectory.messages,
        "num_prompt_messages": trajectory.num_prompt_messages,
        "prompt_ids": trajectory.prompt_ids,
        "completion_ids": trajectory.completion_ids,
        "completion_mask": trajectory.completion_mask,
        "logprobs": trajectory.logprobs,
        "policy_versions": trajectory.policy_versions,
        "turn_outputs": trajectory.turn_outputs,
        "tool_results": [
            {"name": result.name, "content": result.content, "status": result.status}
            for result in trajectory.tool_results
        ],
        "spans": [
            {"kind": s.kind, "name": s.name, "start_s": s.start_s, "end_s": s.end_s}
            for s in trajectory.spans
        ],
    }


def _known(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = sorted(fields.keys() - _DEFAULTS.keys())
    if unknown:
        raise TypeError(f"A record has no fields {unknown}. They are: {sorted(_DEFAULTS)}.")
    return fields


def _next_session(path: Path) -> int:
    """How many writers the file had, plus one; takes away the end of a line that was cut off."""
    if not path.exists() or path.stat().st_size == 0:
        return 1
    with path.open("r+b") as file:
        first = last = b""
        end = 0
        for line in file:
            first = first or line
            if line.endswith(b"\n"):
                last, end = line, end + len(line)
        if end == 0 and first.startswith(_BEGINNING):  # killed within its first line
            file.truncate(0)
            return 1
        session = _session_of(first, path) and _session_of(last, path)
        file.truncate(end)
        return session + 1


def _session_of(line: bytes, path: Path) -> int:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, Mapping) or value.get("schema") != SCHEMA_VERSION:
        raise RecordError(
            f"{path} is there and is no record of schema {SCHEMA_VERSION}. Move it away, or choose "
            "another path (the trainer's is `output_dir/rollouts.jsonl`)."
        )
    return value["session"]
