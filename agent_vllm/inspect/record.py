"""Trajectories as JSON lines, written as they end: a line is one trajectory, whole or not there."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from agent_vllm.types import Trajectory

SCHEMA_VERSION = 1


class RolloutRecorder:
    """Appends trajectories to a file; each line is flushed, so a killed run leaves whole lines.

    Args:
        path: made with its folders, appended to if it is there.

    Raises:
        OSError: the folder can't be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a lone surrogate, which a model can write in a call, becomes JSON's own escape
        self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        if _ends_inside_a_line(self.path):  # of a run that was killed
            self._file.write("\n")

    def write(self, trajectory: Trajectory, **extra: Any) -> None:
        """One line: the schema version, `extra` (step, reward, ...), and all of the trajectory."""
        line = {"schema": SCHEMA_VERSION, **extra, **trajectory_record(trajectory)}
        self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


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
        "tool_results": [asdict(result) for result in trajectory.tool_results],
        "spans": [asdict(span) for span in trajectory.spans],
    }


def read_rollouts(path: str | Path) -> Iterator[Mapping[str, Any]]:
    """The file's lines, one at a time.

    Raises:
        ValueError: a line is not JSON or of another schema; names the line.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not a whole JSON line: {error}") from error
            if record.get("schema") != SCHEMA_VERSION:
                raise ValueError(
                    f"{path}:{number} has schema {record.get('schema')!r}, this version reads "
                    f"{SCHEMA_VERSION}."
                )
            yield record
