"""Define the format of recorded rollouts, schema 3: one model checks what is written and read.

`docs/records.md` describes the fields. Invariant: a record has every field, and either no learner
logprobs or one per completion token.
"""

import json
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)

from agent_vllm.errors import RecordError
from agent_vllm.types import StopReason, Trajectory, Turn

SCHEMA_VERSION = 3

# Lax floats: "NaN" and "Infinity", which `to_json` writes for what JSON lacks, are numbers again.
Number = float | None


class RunFields(BaseModel):
    """Hold what only the run knows about a trajectory. Length: C completion tokens."""

    model_config = ConfigDict(frozen=True)

    mode: str = "rollout"
    step: StrictInt = 0
    rank: StrictInt = 0
    rollout: StrictInt = 0
    group: StrictInt = 0
    generation: StrictInt = 0
    seed: StrictInt | None = None
    temperature: Number = None
    max_model_len: StrictInt | None = None
    started: Number = None
    tools: list[str] = []
    rewards: dict[str, Number] = {}
    advantage: Number = None
    trained: StrictBool = False
    learner_logprobs: list[float] | None = None  # [C]
    row: dict[Any, Any] = {}  # keys are text once it is read


class RolloutRecord(RunFields):
    """Hold one recorded trajectory, as one line of the file does. Length: P prompt tokens.

    `record["name"]` reads a field, or a flat view of the trajectory such as
    `record["completion_ids"]`.
    """

    schema_version: StrictInt = Field(SCHEMA_VERSION, alias="schema")
    id: str
    session: StrictInt
    time: float
    stop_reason: StopReason
    error: str | None
    thinking: bool | None
    messages: list[dict[str, Any]]
    num_prompt_messages: StrictInt
    prompt_ids: list[StrictInt]  # [P]
    turns: list[Turn]
    token_texts: dict[str, str]

    @cached_property
    def trajectory(self) -> Trajectory:
        """Return the trajectory that was recorded."""
        return Trajectory(
            prompt_ids=self.prompt_ids,
            turns=self.turns,
            stop_reason=self.stop_reason,
            messages=self.messages,
            num_prompt_messages=self.num_prompt_messages,
            thinking=self.thinking,
            error=self.error,
        )

    def __getitem__(self, name: str) -> Any:
        return getattr(self if name in type(self).model_fields else self.trajectory, name)

    def texts_of(self, token_ids: Iterable[int]) -> list[str]:
        """Return the text of each id; empty if the record was written without a tokenizer."""
        return [self.token_texts.get(str(token), "") for token in token_ids]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        num_tokens = sum(len(segment.token_ids) for segment in self.trajectory.segments)
        if self.learner_logprobs is not None and len(self.learner_logprobs) != num_tokens:
            raise ValueError(
                f"`learner_logprobs` must have one number per completion token, got "
                f"{len(self.learner_logprobs)} for {num_tokens} tokens."
            )
        if not 0 <= self.num_prompt_messages <= len(self.messages):
            raise ValueError(
                f"`num_prompt_messages` must be at most the number of messages, got "
                f"{self.num_prompt_messages} of {len(self.messages)}."
            )
        return self


_NAMES = [field.alias or name for name, field in RolloutRecord.model_fields.items()]


def check_record(value: Mapping[str, Any], where: str) -> RolloutRecord:
    """Return the record that a line's JSON object holds.

    Raises:
        RecordError: a field is missing or wrong; the message names `where`, field and value.
    """
    for name in _NAMES:
        if name not in value:
            raise RecordError(f"{where} has no `{name}`.")
    try:
        return RolloutRecord.model_validate(value)
    except ValidationError as error:
        raise RecordError(f"{where}{_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f" has no `{name}`."
    if problem["type"] == "value_error":  # raised by a check of ours, which says it all
        return f": {name and f'`{name}`: '}{problem['msg'].removeprefix('Value error, ')}"
    wanted = problem["msg"].removeprefix("Input should be ")
    return f": `{name}` must be {wanted}, got {repr(problem['input'])[:80]}."


# ---- JSON ----


def to_json(value: Any, *, ensure_ascii: bool = False) -> str:
    """Return JSON that every reader accepts.

    Numbers that JSON lacks become "NaN", "Infinity" and "-Infinity".
    """
    options: dict[str, Any] = {
        "ensure_ascii": ensure_ascii,
        "separators": (",", ":"),
        "default": _plain,
    }
    try:
        return json.dumps(value, allow_nan=False, **options)
    except (TypeError, ValueError):  # such a number, or a key that is no text
        return json.dumps(_spelled_out(value), **options)


def _plain(value: Any) -> Any:
    """Return arrays and sets as lists, anything else that JSON has no form for as its `str`."""
    if hasattr(value, "tolist"):
        return _spelled_out(value.tolist())
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _spelled_out(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _spelled_out(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled_out(item) for item in value]
    return value
