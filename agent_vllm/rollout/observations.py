"""Cut tool results to fit what a trajectory has left.

Pure: knows no engine and no clock. Invariant: what is returned fits, or nothing is returned.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent_vllm.types import ToolResult


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
