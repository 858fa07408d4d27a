"""Reads turns in which a mark opens what the model calls: thinking, text, calls, in any order.

Owns what forms with such a mark have in common; how calls are written behind the mark is their own.
Invariant: any text gives a `ParsedTurn`; nothing inside a thinking block is a call, and what could
not be read stays in the content as the model wrote it.
"""

import re
from collections.abc import Callable
from typing import Any

from agent_vllm.chat.parsing.turn import SampledTurn
from agent_vllm.types import ParsedTurn, ToolCall

_THINK, _THINK_END = "<think>", "</think>"

ReadCalls = Callable[[str, int], tuple[list[ToolCall], int]]
"""The calls that begin behind a mark, at this position, and the position after them."""


def read_marked(
    turn: SampledTurn, mark: str, read_calls: ReadCalls, *, thinking_key: str = "reasoning_content"
) -> ParsedTurn:
    """One turn as a message and its calls. The message's `content` is text, never None."""
    text = turn.text
    opening = re.compile(f"{_THINK}|{re.escape(mark)}")
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    position = _read_thought(text, 0, thoughts) if turn.starts_in_thinking else 0
    while found := opening.search(text, position):
        content.append(text[position : found.start()])
        if found.group() == _THINK:
            position = _read_thought(text, found.end(), thoughts)
            continue
        read, position = read_calls(text, found.end())
        calls += read
        if any(call.error is not None for call in read):
            content.append(text[found.start() : position])
    content.append(text[position:])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content).strip()}
    if reasoning := "\n".join(filter(None, thoughts)):
        message[thinking_key] = reasoning
    if readable := [call for call in calls if call.error is None]:
        message["tool_calls"] = [call.as_message() for call in readable]
    return ParsedTurn(message=message, calls=calls)


def malformed(text: str, start: int, end_mark: str, error: str) -> tuple[list[ToolCall], int]:
    """A call that could not be read, up to its closing mark or the text's end."""
    close = text.find(end_mark, start)
    end = len(text) if close < 0 else close + len(end_mark)
    return [ToolCall(name="unknown", arguments=None, error=error)], end


def _read_thought(text: str, start: int, thoughts: list[str]) -> int:
    """Note the thinking that begins at `start`; the position after its end, or after the text."""
    close = text.find(_THINK_END, start)
    end = len(text) if close < 0 else close
    thoughts.append(text[start:end].strip())
    return min(end + len(_THINK_END), len(text))
