"""Find what a conversation goes on from, among those that were answered.

Pure: knows no ids and no engine. Invariant: two conversations are one if they say the same in the
same order, however a client wrote their messages down.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agent_vllm.chat.messages import for_template
from agent_vllm.types import Messages

T = TypeVar("T")
Key = bytes  # of a conversation: its tools, then message by message


@dataclass(frozen=True, kw_only=True, slots=True)
class Place(Generic[T]):
    """Hold where a conversation stands among those that were answered.

    Attributes:
        answered: what was stored with the longest answered conversation that it begins with; None
            if there is none.
        messages: all of the conversation, in the form that templates expect.
        num_known: those of them that the answered one holds.
        key: of the whole conversation.
    """

    answered: T | None
    messages: list[dict[str, Any]]
    num_known: int
    key: Key

    @property
    def new_messages(self) -> list[dict[str, Any]]:
        return self.messages[self.num_known :]


class History(Generic[T]):
    """Remember what answered each conversation of one trajectory."""

    def __init__(self) -> None:
        self._answered: dict[Key, T] = {}
        self._same: dict[Key, Key] = {}  # another form of an answer, and the one that counts

    def find(self, messages: Messages, tools: str = "") -> Place[T]:
        """Return where the conversation stands.

        Args:
            tools: on offer, as text.

        Raises:
            ChatTemplateError: one is no message, or its content holds a block that is not text.
        """
        plain = for_template(messages)
        key, num_known, answered = _digest(b"", tools), 0, None
        for index, message in enumerate(plain):
            key = self._next(key, message)
            if key in self._answered:
                answered, num_known = self._answered[key], index + 1
        return Place(answered=answered, messages=plain, num_known=num_known, key=key)

    def add(self, key: Key, answers: Sequence[Messages], value: T) -> None:
        """Remember what answered a conversation.

        Args:
            key: of the conversation.
            answers: the messages of the answer, in each form in which a client may know it.
        """
        first, *others = [self._end(key, answer) for answer in answers]
        self._answered[first] = value
        self._same |= {other: first for other in others if other != first}

    def _end(self, key: Key, messages: Messages) -> Key:
        for message in for_template(messages):
            key = _digest(key, _plain_text(message))
        return key

    def _next(self, key: Key, message: dict[str, Any]) -> Key:
        key = _digest(key, _plain_text(message))
        return self._same.get(key, key)


def _digest(key: Key, text: str) -> Key:
    return hashlib.blake2b(key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _plain_text(message: dict[str, Any]) -> str:
    """Return what a message says, without what clients add, drop or write in their own way."""
    kept: dict[str, Any] = {"role": message.get("role"), "content": message.get("content") or ""}
    if message.get("role") == "assistant":
        kept["content"] = kept["content"].strip()
        kept["calls"] = [_call(call) for call in message.get("tool_calls") or []]
        kept["thinking"] = message.get("reasoning_content") or ""
    elif message.get("role") != "tool":
        kept["name"] = message.get("name") or ""
    return json.dumps(kept, sort_keys=True)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return [function.get("name"), function.get("arguments") or {}]
