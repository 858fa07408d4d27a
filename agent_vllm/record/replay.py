"""Replay recorded completions and tool results instead of a model and tools.

Owns which recorded turn answers which request. Invariant: a turn is returned only after exactly the
ids that came before it when it was recorded.
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
from agent_vllm.record.reader import read_rollouts
from agent_vllm.record.schema import RolloutRecord
from agent_vllm.tools import Tool, ToolFailure, tools_by_name
from agent_vllm.types import Completion, StopReason, ToolResult, Turn


class _Playback:
    """Play one recorded trajectory back; each turn and each result once."""

    def __init__(self, record: RolloutRecord) -> None:
        trajectory = record.trajectory
        self.record_id = record.id
        self._ids = list(trajectory.prompt_ids)  # up to the next recorded turn
        self._turns = deque(trajectory.turns)
        self._results = deque(
            call.result for call in trajectory.calls if call.result.status != "invalid"
        )
        self._failure = None
        if trajectory.stop_reason is StopReason.ENGINE_ERROR:
            self._failure = trajectory.error or "engine error"

    def expects(self, ids: list[int]) -> bool:
        return self._ids == ids and (bool(self._turns) or self._failure is not None)

    def next_turn(self) -> Turn:
        """Return the turn that was sampled here.

        Raises:
            EngineError: the engine failed here when this was recorded.
        """
        if not self._turns:
            raise EngineError(self._failure)
        turn = self._turns.popleft()
        self._ids += turn.segment.token_ids
        self._ids += turn.suffix.token_ids if turn.suffix else []
        return turn

    def next_result(self, tool: str) -> ToolResult:
        """Return the next call's result. Calls that can't run are answered without their tool."""
        if not self._results or self._results[0].name != tool:
            raise ToolFailure(f"Record {self.record_id} has no call of {tool!r} here.")
        return self._results.popleft()


# The trajectory that the running rollout and its tool calls are played back from.
_playing: ContextVar[_Playback | None] = ContextVar("playing", default=None)


class ReplayRolloutEngine(RolloutEngine):
    """Return recorded completions: the same inputs make the same trajectories, byte for byte.

    The samples of one prompt are used in recorded order. Later turns are found by the rollout that
    asks and by all ids so far. Tools run for real, unless they are `recorded_tools`. Times don't
    repeat: a trajectory that ended at a deadline continues here and finds no further turn.

    Args:
        records: what `read_rollouts` yields, or a path for it; all are held in memory.
        tokenizer: that of the recorded run.
        max_model_len: default is that of the recorded run.
        eos_token_ids: ids that ended turns, besides the tokenizer's own.

    Raises:
        RecordError: a file can't be read; or, from `generate`, no record expects these ids.

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
            queue = self._waiting.setdefault(tuple(record.prompt_ids), deque())
            queue.append(_Playback(record))

    async def _sample(self, request: GenerationRequest) -> Completion:
        playback = self._find(request.prompt_ids)
        _playing.set(playback)
        turn = playback.next_turn()
        segment = turn.segment
        has_ended = turn.suffix is not None or {*segment.token_ids[-1:]} & {*self.eos_token_ids}
        return Completion(
            token_ids=segment.token_ids,
            logprobs=segment.logprobs or [],
            finish_reason="stop" if has_ended else "length",
            policy_version=segment.policy_version or 0,
            token_versions=segment.token_versions,
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
        """Do nothing: a record has no weights. Only the version counts up."""


def recorded_tools(tools: Iterable[Tool | Callable[..., Any]]) -> list[Tool]:
    """Return tools with the same description that answer what was recorded instead of running.

    For rollouts with a `ReplayRolloutEngine`, which knows which results come next.
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
        ids = record.prompt_ids + record.trajectory.completion_ids
        if min(ids) < 0:
            raise RecordError(f"Record {record.id} is redacted: its ids can't be replayed.")
        yield ids


def _max_model_len(records: Sequence[RolloutRecord]) -> int:
    lengths = [length for r in records if (length := r.max_model_len) is not None]
    if not lengths:
        raise RecordError("The records have no `max_model_len`. Pass that of the recorded run.")
    return max(lengths)
