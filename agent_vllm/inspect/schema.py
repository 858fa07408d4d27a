"""The format of recorded rollouts, schema 2: its fields, its numbers, and the check of a record.

`docs/records.md` describes it. Invariant: a checked record has every field, of the right type and
with lists of one length.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, cast

from agent_vllm.errors import RecordError
from agent_vllm.types import StopReason

SCHEMA_VERSION = 2


class RunFields(TypedDict):
    """What the run knows of a trajectory; `docs/records.md` says what each field means."""

    mode: str
    step: int
    rank: int
    rollout: int
    group: int
    generation: int
    seed: int | None
    temperature: float | None
    max_model_len: int | None
    started: float | None
    tools: list[str]
    rewards: Mapping[str, float | None]
    advantage: float | None
    trained: bool
    learner_logprobs: list[float] | None  # [C]
    row: Mapping[str, Any]


class RolloutRecord(RunFields):
    """One line of the file. Lengths: P prompt tokens, C completion tokens."""

    schema: int
    id: str
    session: int
    time: float
    stop_reason: str
    error: str | None
    thinking: bool | None
    messages: list[dict[str, Any]]
    num_prompt_messages: int
    prompt_ids: list[int]  # [P]
    completion_ids: list[int]  # [C]
    completion_mask: list[int]  # [C]
    logprobs: list[float]  # [C]
    token_texts: dict[str, str]
    policy_versions: list[int]
    turn_outputs: list[str]
    tool_results: list[dict[str, str]]
    spans: list[dict[str, Any]]


def text_pieces(record: RolloutRecord, token_ids: Sequence[int]) -> list[str]:
    """The texts of some of the record's ids; empty where it was written without a tokenizer."""
    return [record["token_texts"].get(str(token), "") for token in token_ids]


# ---- the check ----


def _all_of(*types: type) -> Callable[[Any], bool]:
    allowed = set(types)
    return lambda value: type(value) is list and set(map(type, value)) <= allowed


def _one_of(*types: type | None) -> Callable[[Any], bool]:
    allowed = {type(None) if kind is None else kind for kind in types}
    return lambda value: type(value) in allowed


def _is_mask(value: Any) -> bool:
    return _all_of(int)(value) and set(value) <= {0, 1}


def _are_results(value: Any) -> bool:
    return _all_of(dict)(value) and all(
        result.keys() == {"name", "content", "status"} and set(map(type, result.values())) <= {str}
        for result in value
    )


def _are_spans(value: Any) -> bool:
    return _all_of(dict)(value) and all(
        span.keys() == {"kind", "name", "start_s", "end_s"}
        and span["kind"] in ("model", "tool", "user")
        and type(span["name"]) is str
        and {type(span["start_s"]), type(span["end_s"])} <= {int, float}
        for span in value
    )


def _are_numbers_by_name(value: Any) -> bool:
    return type(value) is dict and set(map(type, value.values())) <= {int, float, type(None)}


def _are_texts_by_name(value: Any) -> bool:
    return type(value) is dict and set(map(type, value.values())) <= {str}


_TEXT = ("text", _one_of(str))
_COUNT = ("a whole number", _one_of(int))
_NUMBER = ("a number or null", _one_of(int, float, None))
_IDS = ("a list of whole numbers", _all_of(int))
_NUMBERS = ("a list of numbers", _all_of(int, float))
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "schema": _COUNT,
    "id": _TEXT,
    "session": _COUNT,
    "mode": _TEXT,
    "step": _COUNT,
    "rank": _COUNT,
    "rollout": _COUNT,
    "group": _COUNT,
    "generation": _COUNT,
    "seed": ("a whole number or null", _one_of(int, None)),
    "time": _NUMBER,
    "started": _NUMBER,
    "temperature": _NUMBER,
    "max_model_len": ("a whole number or null", _one_of(int, None)),
    "tools": ("a list of names", _all_of(str)),
    "rewards": ("numbers or null by name", _are_numbers_by_name),
    "advantage": _NUMBER,
    "trained": ("true or false", _one_of(bool)),
    "stop_reason": ("a stop reason", lambda value: value in list(StopReason)),
    "error": ("text or null", _one_of(str, None)),
    "thinking": ("true, false or null", _one_of(bool, None)),
    "messages": ("a list of messages", _all_of(dict)),
    "num_prompt_messages": _COUNT,
    "prompt_ids": _IDS,
    "completion_ids": _IDS,
    "completion_mask": ("a list of 0 and 1", _is_mask),
    "logprobs": _NUMBERS,
    "learner_logprobs": (
        "a list of numbers or null",
        lambda value: value is None or _NUMBERS[1](value),
    ),
    "token_texts": ("texts by token id", _are_texts_by_name),
    "policy_versions": _IDS,
    "turn_outputs": ("a list of texts", _all_of(str)),
    "tool_results": ("a list of name, content and status", _are_results),
    "spans": ("a list of kind, name, start_s and end_s", _are_spans),
    "row": ("an object", _one_of(dict)),
}


def check_record(value: Mapping[str, Any], where: str) -> RolloutRecord:
    """The record, after its fields were looked at; numbers that JSON lacks are numbers again.

    Raises:
        RecordError: a field is missing or wrong, or lengths differ; `where` says where.
    """
    record = _with_numbers(value)
    for name, (wanted, holds) in _FIELDS.items():
        if name not in record:
            raise RecordError(f"{where} has no `{name}`.")
        if not holds(record[name]):
            got = repr(record[name])
            raise RecordError(f"{where}: `{name}` must be {wanted}, got {got[:80]}.")
    _check_lengths(record, where)
    return cast(RolloutRecord, record)


def _check_lengths(record: Mapping[str, Any], where: str) -> None:
    names = ["completion_ids", "completion_mask", "logprobs"]
    if record["learner_logprobs"] is not None:
        names.append("learner_logprobs")
    lengths = {name: len(record[name]) for name in names}
    if len(set(lengths.values())) > 1:
        raise RecordError(f"{where}: these must have one length, got {lengths}.")
    if not 0 <= record["num_prompt_messages"] <= len(record["messages"]):
        raise RecordError(
            f"{where}: `num_prompt_messages` is {record['num_prompt_messages']} of "
            f"{len(record['messages'])} messages."
        )


_NOT_IN_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _with_numbers(value: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes what `to_json` does to numbers that JSON lacks, in the fields that hold numbers."""
    record = dict(value)
    for name in ("logprobs", "learner_logprobs"):
        numbers = record.get(name)
        if type(numbers) is list and str in set(map(type, numbers)):
            record[name] = [_number(number) for number in numbers]
    for name in {"advantage", "temperature"} & record.keys():
        record[name] = _number(record[name])
    if type(record.get("rewards")) is dict:
        record["rewards"] = {name: _number(item) for name, item in record["rewards"].items()}
    return record


def _number(value: Any) -> Any:
    return _NOT_IN_JSON.get(value, value) if type(value) is str else value


# ---- JSON ----


def to_json(value: Any, *, ensure_ascii: bool = False) -> str:
    """JSON that every reader takes: numbers that JSON lacks are "NaN", "Infinity", "-Infinity"."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False, default=_plain)
    except (TypeError, ValueError):  # such a number, or a key that is no text
        return json.dumps(_spelled_out(value), ensure_ascii=ensure_ascii, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON has no form for: arrays and sets as lists, anything else by `str`."""
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
