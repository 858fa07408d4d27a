"""Ask a simulated user for messages after an answer, and write them by the template.

Owns how a user is asked and which ids its message adds. Invariant: those ids extend what was
sampled; nothing before them changes.
"""

import copy
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agent_vllm.chat import ChatFormat, num_common
from agent_vllm.errors import ChatTemplateError
from agent_vllm.tools import Tool, ToolRunner
from agent_vllm.types import Messages, ToolCall

User = Callable[[list[dict[str, Any]]], str | Awaitable[str | None] | None]
"""Takes a copy of the conversation, which ends with the model's answer, and returns the next user
message, or None to end the conversation. Sync or async; one per trajectory."""

_ANSWER = "Noted."
_PROBES = ("Yes.", "No.")


class UserFailed(Exception):
    """The simulated user raised, timed out, or returned something that is not a message."""


async def ask_user(
    user: User, messages: Messages, runner: ToolRunner, time_left_s: float | None
) -> str | None:
    """Return the next user message, or None; the user has the time of a tool call.

    Raises:
        UserFailed: the user failed; says why.
    """
    call = ToolCall(name="user", arguments={})
    (result,) = await runner.run([call], {"user": _as_tool(user, messages)}, time_left_s)
    if result.status != "ok":
        raise UserFailed(json.loads(result.content)["error"])
    return result.content[1:] if result.content else None


def user_suffix_ids(
    chat: ChatFormat, message: str, tools: Sequence[Tool] = (), *, last_token_id: int | None = None
) -> list[int]:
    """Return what the template writes after an answer: the user's message and a turn's header.

    Args:
        tools: the row's tools, as in `ChatFormat.prompt_ids`.
        last_token_id: the last id before the suffix. If it isn't the template's end of turn, the
            suffix begins with that end.

    Raises:
        ChatTemplateError: no end token stands between an answer and the next user message.
    """
    texts = (chat.as_data(message), *_PROBES)
    full, *probes = [_two_turns(chat, text, tools) for text in texts]
    shared = num_common(*probes)
    ends = [i for i in range(shared) if probes[0][i] in chat.end_token_ids]
    cut = ends[-1] + 1 if ends else 0
    if full[:cut] != probes[0][:cut] or _ANSWER not in chat.tokenizer.decode(full[:cut]):
        raise ChatTemplateError(
            "The chat template writes no end token between an answer and the next user message, "
            "so a simulated user can't be used with it. Leave `users_batch` out."
        )
    return full[cut:] if last_token_id == full[cut - 1] else full[cut - 1 :]


def _as_tool(user: User, messages: Messages) -> Tool:
    def asked() -> str | Awaitable[str]:
        said = user(copy.deepcopy(list(messages)))  # type: ignore[arg-type]
        return _awaited(said) if inspect.isawaitable(said) else _checked(said)

    return Tool(schema={"function": {"name": "user"}}, function=asked)


async def _awaited(said: Awaitable[str | None]) -> str:
    return _checked(await said)


def _checked(said: Any) -> str:
    """Return the message as the text of a tool's result: behind a mark, or empty for None."""
    if said is not None and not isinstance(said, str):
        raise TypeError(f"A user must say a string or None, got {type(said).__name__}.")
    return "" if said is None else f"={said}"


def _two_turns(chat: ChatFormat, message: str, tools: Sequence[Tool]) -> list[int]:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": message},
    ]
    return chat.prompt_ids(messages, tools)
