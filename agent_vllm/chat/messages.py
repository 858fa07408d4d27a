"""Bring messages, as datasets and the OpenAI API store them, into the form that templates expect.

Invariant: a conversation is written the same before and after it was stored as a table, which gives
each message the keys of all others, with None as their value.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any

from agent_vllm.errors import ChatTemplateError
from agent_vllm.types import Messages


def for_template(messages: Messages) -> list[dict[str, Any]]:
    """Return copies that templates may write to.

    Keys with None are left out, content is one string, a call's arguments are an object. A None
    among these is kept unless the conversation was stored as a table.

    Raises:
        ChatTemplateError: one is no message, or its content holds a block that is not text.
    """
    for message in messages:
        if not isinstance(message, Mapping):
            raise ChatTemplateError(
                f"A message must be a dict with `role` and `content`, got {type(message).__name__}."
            )
    is_table = any(message.get("tool_calls", ()) is None for message in messages)
    return [_message(message, is_table) for message in messages]


def _message(message: Mapping[str, Any], is_table: bool) -> dict[str, Any]:
    calls = message.get("tool_calls")
    new: dict[str, Any] = {
        key: value if isinstance(value, str) else copy.deepcopy(value)
        for key, value in message.items()
        if value is not None and key != "tool_calls"
    }
    content = new.get("content")
    if isinstance(content, list):
        new["content"] = _text(content, new.get("role"))
    if calls is not None:
        new["tool_calls"] = [_call(call, is_table) for call in calls]
        new.setdefault("content", "")
    return new


def _call(call: Any, is_table: bool) -> Any:
    call = _without_none(call, depth=2)  # keys of the call and of its function
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and "arguments" in function:
        arguments = _parsed(function["arguments"])
        function["arguments"] = _without_none(arguments) if is_table else copy.deepcopy(arguments)
    return call


def _parsed(arguments: Any) -> Any:
    """Return arguments given as text, the OpenAI API's form, as an object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _without_none(value: Any, depth: int | None = None) -> Any:
    """Return a copy without the keys whose value is None, down to `depth` dicts."""
    if depth == 0:
        return value
    if isinstance(value, Mapping):
        rest = None if depth is None else depth - 1
        return {k: _without_none(v, rest) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(item, depth) for item in value]
    return copy.deepcopy(value)


def _text(blocks: list[Any], role: Any) -> str:
    texts = [block["text"] for block in blocks if _is_text(block)]
    if len(texts) < len(blocks):
        kinds = [block.get("type") if isinstance(block, dict) else block for block in blocks]
        raise ChatTemplateError(
            f"Rollouts are text only, got a message of role {role!r} with content blocks {kinds}. "
            "Leave images out, or describe them in text."
        )
    return "".join(texts)


def _is_text(block: Any) -> bool:
    return (
        isinstance(block, dict)
        and block.get("type") == "text"
        and isinstance(block.get("text"), str)
    )
