"""Recorded completions and tool results in the place of a model and of tools; the rest is real.

Owns which recorded turn answers which request. Invariant: a turn is given back only after exactly
the ids that came before it when it was recorded.
"""

import json
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.engines.base import GenerationRequest, RolloutEngine
from agent_vllm.engines.models import merge_end_token_ids
from agent_vllm.errors import EngineError, RecordError
from agent_vllm.record.reader import read_rollouts, to_trajectory
from agent_vllm.record.schema import RolloutRecord
from agent_vllm.tools import Tool, ToolFailure, tools_by_name
from agent_vllm.types import Completion, Segment, StopReason, ToolResult


class _Playback:
    """One recorded trajectory while it is played back; each turn and each result once."""

    def __init__(self, record: RolloutRecord) -> None:
        trajectory = to_trajectory(record)
        self.record_id = record["id"]
        self._ids = list(trajectory.prompt_ids)  # up to the next recorded turn
        self._segments = deque(trajectory.segments)
        self._results = deque(r for r in trajectory.tool_results if r.status != "invalid")
        self._failure = None
        if trajectory.stop_reason is StopReason.ENGINE_ERROR:
            self._failure = trajectory.error or "engine error"

    def expects(self, ids: list[int]) -> bool:
        return self._ids == ids and (bool(self._segments) or self._failure is not None)

    def next_turn(self) -> Segment:
        """The turn that was sampled here.

        Raises:
            EngineError: the engine failed here when this was recorded.
        """
        if not self._segments:
            raise EngineError(self._failure)
        turn = self._segments.popleft()
        self._ids += turn.token_ids
        while self._segments and not self._segments[0].is_sampled:
            self._ids += self._segments.popleft().token_ids
        return turn

    def next_result(self, tool: str) -> ToolResult:
        """What the next call came to; calls that could not run are answered without their tool."""
        if not self._results or self._results[0].name != tool:
            raise ToolFailure(f"Record {self.record_id} has no call of {tool!r} here.")
        return self._results.popleft()


# What the rollout that runs here, and the tool calls that it starts, are played back from.
_playing: ContextVar[_Playback | None] = ContextVar("playing", default=None)


class ReplayRolloutEngine(RolloutEngine):
    """Gives back recorded completions: the same inputs make the same trajectories, byte for byte.

    The samples of one prompt are handed out in recorded order. Later turns are found by the rollout
    that asks and by all ids so far. Tools run for real, unless they are `recorded_tools`. What
    ended at a deadline goes on here, as time does not repeat, and finds no further turn.

    Args:
        records: of `read_rollouts`, or the path that it would read; all are held in memory.
        tokenizer: of the recorded run.
        max_model_len: default is that of the recorded run.
        eos_token_ids: ids that ended turns, beside the tokenizer's own.

    Raises:
        RecordError: a file that can't be read, or from `generate`: ids that no record expects.

    Example:

    ```python
    trainer = AgentGRPOTrainer(
        ...,
        tools=recorded_tools([search, calculator]),
        rollout_engine=ReplayRolloutEngine("rollouts.jsonl", tokenizer),
    )
    ```
    """

    def __init__(
        self,
        records: Iterable[RolloutRecord] | str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_model_len: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        records = list(read_rollouts(records) if isinstance(records, str | Path) else records)
        super().__init__(
            tokenizer=tokenizer,
            vocab_size=1 + max((max(ids) for ids in _all_ids(records)), default=0),
            max_model_len=max_model_len or _max_model_len(records),
            eos_token_ids=merge_end_token_ids(tokenizer.eos_token_id, list(eos_token_ids)),
        )
        self._waiting: dict[tuple[int, ...], deque[_Playback]] = {}
        self._begun: list[_Playback] = []
        for record in records:
            queue = self._waiting.setdefault(tuple(record["prompt_ids"]), deque())
            queue.append(_Playback(record))

    async def _sample(self, request: GenerationRequest) -> Completion:
        playback = self._find(request.prompt_ids)
        _playing.set(playback)
        turn = playback.next_turn()
        return Completion(
            token_ids=turn.token_ids,
            logprobs=turn.logprobs or [],
            finish_reason="stop" if turn.token_ids[-1] in self.eos_token_ids else "length",
            policy_version=turn.policy_version or 0,
        )

    def _find(self, ids: list[int]) -> _Playback:
        own = _playing.get()
        if own is not None and own.expects(ids):
            return own
        queue = self._waiting.get(tuple(ids))
        if queue:
            self._begun.append(queue.popleft())
            return self._begun[-1]
        for playback in self._begun:
            if playback.expects(ids):
                return playback
        raise RecordError(self._what_differs(ids, own))

    def _what_differs(self, ids: list[int], own: _Playback | None) -> str:
        if tuple(ids) in self._waiting:
            return (
                f"The prompt of {len(ids)} tokens was asked for more often than it was recorded. "
                "Record more samples, or replay with the same `num_generations`."
            )
        source = "No record has this prompt" if own is None else f"Record {own.record_id} differs"
        text = self.tokenizer.decode(ids[-40:])
        return (
            f"{source}: none was recorded after these {len(ids)} tokens, which end in {text!r}. "
            "Replay with the chat template, tools, limits and `max_model_len` of the recorded run."
        )

    def _load_weights(self, model: PreTrainedModel) -> None:
        """A record has no weights; only the version counts up."""


def recorded_tools(tools: Iterable[Tool | Callable[..., Any]]) -> list[Tool]:
    """Tools that are described like these, and answer what was recorded instead of running.

    For rollouts with a `ReplayRolloutEngine`, which says whose results are due.
    """
    return [replace(tool, function=_answer_of(tool.name)) for tool in tools_by_name(tools).values()]


def _answer_of(tool: str) -> Callable[..., Coroutine[Any, Any, str]]:
    async def answer(**_: Any) -> str:  # async tools begin in call order
        playback = _playing.get()
        if playback is None:
            raise ToolFailure(f"Tool {tool!r} plays back a record, but no `ReplayRolloutEngine`.")
        result = playback.next_result(tool)
        if result.status == "failed":
            raise ToolFailure(json.loads(result.content)["error"])
        return result.content

    return answer


def _all_ids(records: Sequence[RolloutRecord]) -> Iterable[list[int]]:
    for record in records:
        ids = record["prompt_ids"] + record["completion_ids"]
        if min(ids) < 0:
            raise RecordError(f"Record {record['id']} is redacted: its ids can't be replayed.")
        yield ids


def _max_model_len(records: Sequence[RolloutRecord]) -> int:
    lengths = [length for r in records if (length := r["max_model_len"]) is not None]
    if not lengths:
        raise RecordError("The records have no `max_model_len`. Give that of the recorded run.")
    return max(lengths)
