"""Convert records of schema 2, which kept a trajectory's tokens, texts, results and times in flat
parallel lists, to schema 3.

Schema 2 had no `token_versions`, and of a call only its result: those stay unknown.
"""

from collections import deque
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from agent_vllm.errors import RecordError
from agent_vllm.record.schema import SCHEMA_VERSION

_TOKENS = ("completion_mask", "completion_ids", "logprobs")
_FLAT = (*_TOKENS, "policy_versions", "turn_outputs", "tool_results", "spans")


def upgraded(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a schema 2 record as schema 3 writes it. Other fields are the same.

    Raises:
        RecordError: its lists don't fit together.
    """
    try:
        turns = _turns(value)
        _add_calls(turns, value["spans"], deque(value["tool_results"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RecordError(f"{where} is no valid record of schema 2: {error!r}.") from error
    kept = {name: item for name, item in value.items() if name not in _FLAT}
    return {**kept, "schema": SCHEMA_VERSION, "turns": turns}


def _turns(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split the tokens into turns: runs of sampled tokens, each with what was written after it."""
    columns = zip(*(value[name] for name in _TOKENS), strict=True)
    runs = [(mask, list(run)) for mask, run in groupby(columns, itemgetter(0))]
    num_sampled = sum(mask for mask, _ in runs)
    texts, versions = value["turn_outputs"], value["policy_versions"]
    if not num_sampled == len(texts) == len(versions):
        raise ValueError(
            f"{num_sampled} sampled turns, {len(texts)} turn outputs and {len(versions)} policy "
            "versions; there must be one per turn"
        )
    turns: list[dict[str, Any]] = []
    for mask, run in runs:
        segment: dict[str, Any] = {"token_ids": [token for _, token, _ in run]}
        if mask:
            segment["logprobs"] = [logprob for *_, logprob in run]
            segment["policy_version"] = versions[len(turns)]
            turns.append({"segment": segment, "text": texts[len(turns)], "calls": []})
        else:
            turns[-1]["suffix"] = segment
    return turns


def _add_calls(
    turns: list[dict[str, Any]], spans: list[dict[str, Any]], results: deque[dict[str, Any]]
) -> None:
    """Give each turn its times and calls. Spans stand in order: a turn's, then one per call.

    The simulated user's wait was a tool span named "user" without a result.
    """
    waiting = iter(turns)
    turn: Any = turns[0] if turns else None
    for span in spans:
        if span["kind"] == "model":
            turn = next(waiting, None)
            turn["span"] = span
        elif results and results[0]["name"] == span["name"]:
            turn["calls"].append(_call(results.popleft(), span))
        else:
            turn["user_span"] = {**span, "kind": "user"}
    if results:
        turn["calls"] += [_call(result, None) for result in results]


def _call(result: dict[str, Any], span: dict[str, Any] | None) -> dict[str, Any]:
    error = result["content"] if result["status"] == "invalid" else None
    call = {"name": result["name"], "arguments": None, "error": error}
    return {"call": call, "result": result, "span": span}
