"""Encode what a tool returned or raised as text for the model.

Owns the text form and its length limit. Standard library only, as isolated calls load this file by
itself. Invariant: every function here ends in bounded text or in `ToolFailure`.
"""

import collections
import dataclasses
import decimal
import enum
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set, ValuesView
from typing import Any

MAX_RESULT_CHARS = 200_000
"""Longer results are cut and marked before they are tokenized. How much of the rest the model sees
is set in tokens, by `Limits.max_tool_result_tokens` and the room left."""

_MAX_EXPONENT = 300  # of a decimal number that becomes a JSON number
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


class ToolFailure(Exception):
    """The call failed with this message, word for word; tools may raise it."""


class InvalidArguments(ToolFailure):
    """The call's arguments can't be converted to what the function takes."""


class ToolInterrupted(BaseException):
    """A tool raised KeyboardInterrupt: the user wants the run to stop.

    The event loop would let a KeyboardInterrupt through at once and leave other trajectories
    hanging; this one lets them end first.
    """


def encode_result(value: Any) -> str:
    """Encode a tool's return value: a string as it is, anything else as JSON.

    Mappings become objects, and other containers arrays; sets are sorted. Arrays, tensors, data
    frames, pydantic models, dataclasses, enums and decimal numbers are given by their values, bytes
    are read as UTF-8, and other objects are given by their own `str`. Lone surrogates, which no
    tokenizer takes, become question marks. Text longer than `MAX_RESULT_CHARS` is cut and marked.

    Raises:
        ToolFailure: the value contains itself, is nested too deeply or has no text form.
    """
    if isinstance(value, str):
        return _bounded(str.__str__(value))  # a subclass may have methods of its own
    try:
        text, num_cut = _json_beginning(value)
    except Exception as error:  # the value's own `__str__` may raise anything
        raise ToolFailure(f"The result can't be written as JSON: {_text_of(error)}") from error
    return _bounded(text, num_cut)


def failure(error: BaseException) -> BaseException:
    """Return what to raise in place of a tool's exception: its type and message, no traceback."""
    if isinstance(error, ToolFailure | ToolInterrupted):
        return error
    if isinstance(error, KeyboardInterrupt):
        return ToolInterrupted()
    return ToolFailure(_bounded(f"{type(error).__name__}: {_text_of(error)}".removesuffix(": ")))


def _bounded(text: str, num_cut: int = 0) -> str:
    num_cut += len(text) - MAX_RESULT_CHARS
    if num_cut > 0:
        text = f"{text[:MAX_RESULT_CHARS]}\n[... {num_cut} characters cut]"
    return text.encode("utf-8", "replace").decode("utf-8")


def _json_beginning(value: Any) -> tuple[str, int]:
    """Return the text of a value, and how many characters of it are not there.

    It is written in pieces, in Python: an endless value fills no memory and can be interrupted.
    """
    try:
        return _joined(_JSON.iterencode(value))
    except TypeError as error:
        if not str(error).startswith("keys must be"):
            raise
    return _joined(_JSON.iterencode(_with_text_keys(value)))


def _joined(pieces: Iterable[str]) -> tuple[str, int]:
    kept, num_chars, num_cut = [], 0, 0
    for piece in pieces:
        if num_chars <= MAX_RESULT_CHARS:
            kept.append(piece)
            num_chars += len(piece)
        else:
            num_cut += len(piece)
    return "".join(kept), num_cut


def _json(value: Any) -> str:
    return _json_beginning(value)[0]


def _with_text_keys(value: Any) -> Any:
    """Return a copy for JSON, in which every key is text."""
    if isinstance(value, Mapping):
        return {_key(key): _with_text_keys(item) for key, item in _first(value.items())}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in _first(value)]
    is_json = value is None or isinstance(value, str | int | float)
    return value if is_json else _with_text_keys(_plain(value))


def _key(key: Any) -> str:
    key = key.value if isinstance(key, enum.Enum) else key
    return key if isinstance(key, str) else _json(key).strip('"')


def _plain(value: Any) -> Any:
    """Return what stands for a value that JSON does not know."""
    convert = _converter_of(value)
    if convert is not None:
        return convert(value)
    text = str(value)
    if _ADDRESS.search(text):  # a name and an address, another one in every run
        raise TypeError(f"an object of type {type(value).__name__} has no text of its own.")
    return text


def _converter_of(value: Any) -> Callable[[Any], Any] | None:
    for kinds, convert in _CONVERTERS:
        if isinstance(value, kinds):
            return convert
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return lambda v: {field.name: getattr(v, field.name) for field in dataclasses.fields(v)}
    return next((c for name, c in _CONVERTERS_BY_METHOD if hasattr(type(value), name)), None)


def _number(value: decimal.Decimal) -> Any:
    """Return a decimal number as a JSON number where that loses nothing, else as text."""
    if not value.is_finite() or abs(value.adjusted()) > _MAX_EXPONENT:
        return str(value)
    number = int(value) if value == value.to_integral_value() else float(value)
    return number if decimal.Decimal(repr(number)) == value else str(value)


def _frame(value: Any) -> Any:
    """Return the rows of a data frame or series, with their labels where they have some."""
    labels = list(value.index)
    has_labels = labels != list(range(len(labels)))
    if not hasattr(value, "columns"):
        orient = "index" if has_labels else "records"
    else:
        orient = "split" if has_labels else "records"
    return json.loads(value.to_json(orient=orient, date_format="iso", double_precision=15))


def _sorted(items: Collection[Any]) -> list[Any]:
    """Sort in an order that doesn't depend on hashes."""
    kinds = {type(item) for item in items}
    if kinds <= {int, float} or kinds == {str}:
        return sorted(items)
    return sorted(items, key=lambda item: (type(item).__name__, _json(item)))


def _text_of(error: BaseException) -> str:
    try:
        return str.__str__(str(error))
    except BaseException:  # its own `__str__` is broken: the type has to do
        return ""


def _first(items: Iterable[Any]) -> list[Any]:
    """Return as many items as a result may have characters: there may be no last one."""
    return list(itertools.islice(items, MAX_RESULT_CHARS))


_CONVERTERS: list[tuple[Any, Callable[[Any], Any]]] = [
    (enum.Enum, lambda value: value.value),
    (decimal.Decimal, _number),
    (bytes | bytearray | memoryview, lambda value: bytes(value).decode("utf-8", "replace")),
    (Mapping, lambda value: dict(_first(value.items()))),
    (Set, lambda value: _sorted(_first(value))),  # sets, and views of a dict's keys and items
    (Sequence | ValuesView | collections.deque, _first),
]
# Of numpy, torch, pandas, pyarrow and pydantic, none of which is imported here.
_CONVERTERS_BY_METHOD: list[tuple[str, Callable[[Any], Any]]] = [
    ("model_dump", lambda value: value.model_dump(mode="json")),
    ("iloc", _frame),
    ("to_pylist", lambda value: value.to_pylist()),
    ("tolist", lambda value: value.tolist()),
]
_JSON = json.JSONEncoder(ensure_ascii=False, default=_plain)
