"""Reads an assistant turn in the Hermes form: optional thinking, text, `<tool_call>` JSON blocks.

Invariant: any text gives a `ParsedTurn`, in time linear in its length; what is malformed becomes a
call with an error, and nothing inside a thinking block is a call.
"""

import json
import re
from typing import Any

from agent_vllm.chat.parsing.marked import malformed, read_marked
from agent_vllm.chat.parsing.turn import SampledTurn
from agent_vllm.types import ParsedTurn, ToolCall

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
# To the first closing tag that is not inside a JSON string; possessive, so it never looks back.
_BODY = re.compile(rf'(?:[^"<]++|"(?:[^"\\]++|\\.)*+"|<(?!{_CALL_END[1:]}))*+', re.DOTALL)


def parse_hermes(turn: SampledTurn) -> ParsedTurn:
    """One assistant turn as a message (TRL's keys) and its calls.

    The message holds `content` (never None), `reasoning_content` if there was any, and `tool_calls`
    for the calls that could be read; a malformed call stays in `content` as the model wrote it.
    """
    return read_marked(turn, _CALL, _read_call)


def _read_call(text: str, start: int) -> tuple[list[ToolCall], int]:
    """The call whose JSON begins at `start`, and the position after its closing tag."""
    body_end = _BODY.match(text, start).end()  # type: ignore[union-attr]
    body = text[start:body_end].lstrip()
    try:
        value, end = _DECODER.raw_decode(body)
    except json.JSONDecodeError as error:
        return _malformed(text, start, f"The call is not valid JSON: {error.msg}.")
    except ValueError:  # Python reads no integer of more than 4300 digits
        return _malformed(text, start, "The call holds a number of too many digits.")
    except RecursionError:
        return _malformed(text, start, "The call is nested too deeply.")
    if not text.startswith(_CALL_END, body_end):
        return _malformed(text, start, f"The call has no closing {_CALL_END}.")
    if body[end:].strip():
        return _malformed(text, start, "There is text between the call's JSON and its closing tag.")
    return [_as_call(value)], body_end + len(_CALL_END)


def _as_call(value: Any) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall(name="unknown", arguments=None, error='The call has no "name".')
    arguments = value.get("arguments")
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(name=name, arguments=None, error='"arguments" is not a JSON object.')
    if arguments is not None and not isinstance(arguments, dict):
        return ToolCall(name=name, arguments=None, error='"arguments" is not a JSON object.')
    return ToolCall(name=name, arguments=arguments)


def _malformed(text: str, start: int, error: str) -> tuple[list[ToolCall], int]:
    return malformed(text, start, _CALL_END, error)
