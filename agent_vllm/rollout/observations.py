"""Show a trajectory what follows a turn: tool results, cut to what is left, or a user's message.

Pure: knows no engine and no clock. Invariant: what is returned fits, or nothing is returned.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from agent_vllm.chat import ChatFormat
from agent_vllm.environments import user_suffix_ids
from agent_vllm.rollout.budget import Budget
from agent_vllm.rollout.story import Story
from agent_vllm.tools import Tool
from agent_vllm.types import ToolResult


def with_results(
    story: Story, chat: ChatFormat, tools: Sequence[Tool], budget: Budget, *, is_last: bool
) -> Story | None:
    """Return the story with the results of its last turn's calls; None if they don't fit at all.

    Args:
        is_last: no turn follows them.
    """
    ids, shown = fit_results(
        [record.result for record in story.turns[-1].calls],
        room=budget.room if is_last else budget.room - 1,  # for a next token
        max_result_tokens=budget.limits.max_tool_result_tokens,
        write=functools.partial(
            chat.suffix_ids,
            tools=tools,
            last_token_id=story.last_token_id,
            add_generation_prompt=not is_last,
        ),
        truncate=chat.truncate,
    )
    return None if ids is None else story.plus_suffix(ids, [result.message for result in shown])


def with_user_message(
    story: Story, chat: ChatFormat, tools: Sequence[Tool], budget: Budget, message: str
) -> Story | None:
    """Return the story with a user's message after its last answer; None if no token fits after it.

    Raises:
        ChatTemplateError: the template can't be extended by a user's message.
    """
    ids = user_suffix_ids(chat, message, tools, last_token_id=story.last_token_id)
    if len(ids) >= budget.room:
        return None
    return story.plus_suffix(ids, [{"role": "user", "content": message}])


def fit_results(
    results: Sequence[ToolResult],
    *,
    room: int,
    max_result_tokens: int | None,
    write: Callable[[Sequence[ToolResult]], list[int]],
    truncate: Callable[[str, int], str],
) -> tuple[list[int] | None, list[ToolResult]]:
    """Return the ids that show the results, and the results as they show them.

    Results that are too long together are each cut to an equal share of the room.

    Args:
        room: the most ids that may be returned.
        max_result_tokens: the most tokens of one result.
        write: returns the ids of the results and of all that the template writes around them.
        truncate: cuts a text to a number of tokens.

    Returns:
        None in place of the ids if they don't fit even so.
    """

    def cut(max_tokens: int) -> list[ToolResult]:
        return [replace(result, content=truncate(result.content, max_tokens)) for result in shown]

    shown = list(results)
    if max_result_tokens is not None:
        shown = cut(max_result_tokens)
    ids = write(shown)
    if len(ids) <= room:
        return ids, shown
    frame = write([replace(result, content="") for result in shown])
    share = (room - len(frame)) // len(shown)
    if share > 0:
        shown = cut(share)
        ids = write(shown)
    return (ids if len(ids) <= room else None), shown
