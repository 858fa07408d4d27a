"""Tool results that are made to fit; a token is a character here."""

import pytest

from agent_vllm.rollout.observations import fit_results
from agent_vllm.types import ToolResult


def fit(*contents, room, max_result_tokens=None):
    """Each result is written between two marks."""
    ids, shown = fit_results(
        [ToolResult(name="t", content=content, status="ok") for content in contents],
        room=room,
        max_result_tokens=max_result_tokens,
        write=lambda results: [0 for result in results for _ in f"<{result.content}>"],
        truncate=lambda text, max_tokens: text[:max_tokens],
    )
    return ids and len(ids), [result.content for result in shown]


@pytest.mark.parametrize(
    ("contents", "room", "max_result_tokens", "num_ids", "shown"),
    [
        (["abc", "de"], 9, None, 9, ["abc", "de"]),
        (["abc", "de"], 99, 2, 8, ["ab", "de"]),
        (["abcdef", "ghijkl"], 10, None, 10, ["abc", "ghi"]),  # an equal share each
        (["abcdef", "ghijkl"], 10, 4, 10, ["abc", "ghi"]),
        (["abcdef"], 2, None, None, ["abcdef"]),  # room for the frame only
        (["abcdef"], -1, None, None, ["abcdef"]),
    ],
)
def test_results_are_cut_to_what_fits(contents, room, max_result_tokens, num_ids, shown):
    assert fit(*contents, room=room, max_result_tokens=max_result_tokens) == (num_ids, shown)
