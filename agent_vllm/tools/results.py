"""What a call came to, as text for the model: values, and what a tool raised.

Owns the text form and its greatest length. Standard library only, as isolated calls load this file
by itself. Invariant: every function here ends in bounded text or in `ToolFailure`.
"""

import json
import re
from collections.abc import Collection
from typing import Any

MAX_RESULT_CHARS = 200_000
"""Longer results are cut here and marked, before anything tokenizes them. What the model sees of
the rest is set in tokens, by `Limits.max_tool_result_tokens` and the room left."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


class ToolFailure(Exception):
    """The call failed with this message, word for word; tools may raise it."""


class ToolInterrupted(BaseException):
    """A tool raised KeyboardInterrupt: the user wants the run to stop.

    The event loop would let a KeyboardInterrupt through at once and leave other trajectories
    hanging; this one lets them end first.
    """


def encode_result(value: Any) -> str:
    """A tool's return value as text: a string as it is, anything else as JSON.

    Tuples become lists, sets become sorted lists, bytes are read as UTF-8, other objects are given
    by their own `str`. Lone surrogates, which no tokenizer takes, become question marks. Text
    longer than `MAX_RESULT_CHARS` is cut and marked.

    Raises:
        ToolFailure: the value contains itself, is nested too deeply or has no text form.
    """
    try:
        text = value if isinstance(value, str) else _json(value)
    except Exception as error:  # the value's own `__str__` may raise anything
        raise ToolFailure(f"The result can't be written as JSON: {_text_of(error)}") from error
    return _bounded(text)


def failure(error: BaseException) -> BaseException:
    """What stands for `error`, raised by a tool: its kind and message, no traceback."""
    if isinstance(error, ToolFailure | ToolInterrupted):
        return error
    if isinstance(error, KeyboardInterrupt):
        return ToolInterrupted()
    return ToolFailure(_bounded(f"{type(error).__name__}: {_text_of(error)}".removesuffix(": ")))


def _bounded(text: str) -> str:
    num_cut = len(text) - MAX_RESULT_CHARS
    if num_cut > 0:
        text = f"{text[:MAX_RESULT_CHARS]}\n[... {num_cut} characters cut]"
    return text.encode("utf-8", "replace").decode("utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return _sorted(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    text = str(value)
    if _ADDRESS.search(text):  # a name and an address, another one in every run
        raise TypeError(f"an object of type {type(value).__name__} has no text of its own.")
    return text


def _sorted(items: Collection[Any]) -> list[Any]:
    """In an order that doesn't depend on hashes."""
    kinds = {type(item) for item in items}
    if kinds <= {int, float} or kinds == {str}:
        return sorted(items)
    return sorted(items, key=lambda item: (type(item).__name__, _json(item)))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own `__str__` is broken: the kind has to do
        return ""
