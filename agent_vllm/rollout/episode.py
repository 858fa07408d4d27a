"""Tell one trajectory's story: check limits, sample, parse, run tools, append.

Owns the order of these steps; `budget.py` does the arithmetic of limits. Knows of no other
trajectory. Invariant: every turn's prompt is all ids so far, and the story ends with one
`StopReason`.
"""

import asyncio
import functools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent_vllm.chat import ChatFormat
from agent_vllm.engines.base import GenerationRequest, RolloutEngine
from agent_vllm.environments import User, UserFailed, ask_user, user_suffix_ids
from agent_vllm.errors import (
    ChatTemplateError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
)
from agent_vllm.rollout.budget import Budget, Used
from agent_vllm.rollout.observations import fit_results
from agent_vllm.rollout.status import RolloutStatus
from agent_vllm.settings import Limits, SamplingParams
from agent_vllm.tools import Tool, ToolRunner
from agent_vllm.types import (
    CallRecord,
    Completion,
    Messages,
    ParsedTurn,
    Segment,
    Span,
    SpanKind,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutTask:
    """Hold one conversation to go on with, and what it goes on with."""

    messages: Messages
    tools: Mapping[str, Tool]  # by name
    user: User | None = None
    error: str | None = None  # why it can't begin


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutContext:
    """Hold what all trajectories of one rollout share."""

    engine: RolloutEngine
    sampling: SamplingParams
    limits: Limits
    runner: ToolRunner
    status: RolloutStatus
    started_s: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    async def sample(self, request: GenerationRequest) -> Completion:
        """Sample one turn; a request that the engine failed is retried once.

        With the same seed, so that a fault changes nothing of what is sampled, and tokens that lead
        to a fault are not avoided.
        """
        try:
            return await self.engine.sample(request)
        except EngineDeadError:
            raise
        except EngineError:
            self.status.num_retries += 1
            return await self.engine.sample(request)


class Episode:
    """Make one trajectory; used once.

    Args:
        chat: the format, with the thinking switch set.
        prompt_ids: of the task's messages.
        affinity: names the trajectory; no other rollout has the same.
        seeds: of the trajectory's requests.
    """

    def __init__(
        self,
        task: RolloutTask,
        context: RolloutContext,
        *,
        chat: ChatFormat,
        prompt_ids: Sequence[int],
        thinking: bool | None,
        affinity: str,
        seeds: random.Random,
    ) -> None:
        self.task = task
        self.context = context
        self.chat = chat
        self.thinking = thinking
        self.affinity = affinity
        self.seeds = seeds
        self.tools = list(task.tools.values())
        self.messages = [dict(message) for message in task.messages]
        self.prompt_ids = list(prompt_ids)
        self.num_checked_ids = 0  # of all ids so far, checked by the engine
        self.last_token_id: int | None = None  # before a suffix
        self.turns: list[Turn] = []
        self.used = Used(num_prompt_tokens=len(prompt_ids))
        self.error = task.error

    async def run(self) -> Trajectory:
        """Return the trajectory, whatever ended it."""
        try:
            stop = self._budget().stop_before_turn()
            if self.task.error is not None:
                stop = StopReason.ENVIRONMENT_ERROR
            while stop is None:
                stop = await self._turn()
        except ChatTemplateError as error:  # what follows this turn can't be written
            self.error, stop = str(error), StopReason.ENVIRONMENT_ERROR
        finally:
            self.context.engine.forget(self.affinity)
        self.context.status.num_finished += 1
        return Trajectory(
            prompt_ids=self.prompt_ids,
            turns=self.turns,
            stop_reason=stop,
            messages=self.messages,
            num_prompt_messages=len(self.task.messages),
            thinking=self.thinking,
            error=self.error,
        )

    async def _turn(self) -> StopReason | None:
        """Sample, parse, run tools, append. Return what ends the trajectory, or None."""
        self.used = replace(self.used, turn_started_s=self.context.elapsed_s())
        budget = self._budget()
        deadline = asyncio.timeout(budget.turn_time_left_s)
        try:
            async with deadline:
                parsed, is_cut = await self._sample(budget.turn_tokens)
        except (EngineError, InvalidRequestError) as error:
            self.error = str(error)
            return StopReason.ENGINE_ERROR
        except TimeoutError:
            if deadline.expired():
                return StopReason.DEADLINE
            raise
        if is_cut:
            return self._budget().what_cut(budget.turn_tokens)
        if not parsed.calls:
            return await self._ask_user()
        stop = self._budget().stop_before_calls()
        if stop is None:
            await self._run_calls(parsed.calls)
            stop = self._append_results()
        return stop

    def _budget(self) -> Budget:
        return Budget(
            limits=self.context.limits,
            max_model_len=self.context.engine.max_model_len,
            used=replace(self.used, elapsed_s=self.context.elapsed_s()),
        )

    # ---- the model ----

    async def _sample(self, max_new_tokens: int) -> tuple[ParsedTurn, bool]:
        """Sample and append a turn. Return it as it was read, and whether a limit cut it.

        The whole id list lives no longer than this: one that waits for tools holds its ids once.
        """
        request = self._request(max_new_tokens)
        completion = await self.context.sample(request)
        return self._append_turn(request, completion), completion.finish_reason == "length"

    def _request(self, max_new_tokens: int) -> GenerationRequest:
        """Put all ids so far together, which is done once per turn."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.segment.token_ids
            ids += turn.suffix.token_ids if turn.suffix is not None else ()
        return GenerationRequest(
            prompt_ids=ids,
            num_checked_ids=self.num_checked_ids,
            max_new_tokens=max_new_tokens,
            sampling=self.context.sampling,
            seed=self.seeds.getrandbits(31),
            stop_token_ids=self.chat.end_token_ids,
            affinity=self.affinity,
        )

    def _append_turn(self, request: GenerationRequest, completion: Completion) -> ParsedTurn:
        span = self._span("model", f"turn {len(self.turns)}", self.used.turn_started_s)
        parsed = self.chat.parse(
            completion.token_ids,
            request.prompt_ids,
            self.tools,
            is_cut=completion.finish_reason == "length",
        )
        segment = Segment(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            policy_version=completion.policy_version,
            token_versions=completion.token_versions,
        )
        self.turns.append(Turn(segment=segment, text=parsed.text, span=span))
        self.messages.append(parsed.message)
        self.used = self.used.plus_turn(len(segment.token_ids))
        self.num_checked_ids = len(request.prompt_ids) + len(segment.token_ids)
        self.last_token_id = [*request.prompt_ids[-1:], *segment.token_ids][-1]
        self.context.status.count_turn(len(self.turns), len(segment.token_ids))
        return parsed

    # ---- tools ----

    async def _run_calls(self, calls: Sequence[ToolCall]) -> None:
        """Run a turn's calls side by side; their results belong to the turn in call order."""
        time_left_s, status = self._budget().turn_time_left_s, self.context.status
        status.num_in_tools += 1
        try:
            records = await asyncio.gather(*(self._run_call(call, time_left_s) for call in calls))
        finally:
            status.num_in_tools -= 1
        self.turns[-1] = replace(self.turns[-1], calls=records)
        self.used = self.used.plus_tool_round([record.result for record in records])

    async def _run_call(self, call: ToolCall, time_left_s: float | None) -> CallRecord:
        start_s = self.context.elapsed_s()
        with self.context.status.calling(call.name):
            [result] = await self.context.runner.run([call], self.task.tools, time_left_s)
        span = self._span("tool", call.name, start_s)
        return CallRecord(call=call, result=replace(result, call_id=call.id), span=span)

    def _append_results(self) -> StopReason | None:
        """Feed the turn's results back, cut to what fits; with no room at all they stay out."""
        results = [record.result for record in self.turns[-1].calls]
        budget = self._budget()
        stop = budget.stop_after_calls()
        if any(r.status == "ok" and self.task.tools[r.name].ends_episode for r in results):
            stop = StopReason.ENVIRONMENT_DONE
        ids, shown = fit_results(
            results,
            room=budget.room if stop is not None else budget.room - 1,  # for a next token
            max_result_tokens=self.context.limits.max_tool_result_tokens,
            write=functools.partial(
                self.chat.suffix_ids,
                tools=self.tools,
                last_token_id=self.last_token_id,
                add_generation_prompt=stop is None,
            ),
            truncate=self.chat.truncate,
        )
        if ids is None:
            return stop or budget.tightest
        self._append_suffix(ids, [result.message for result in shown])
        return stop or self._budget().stop_before_turn()

    # ---- the simulated user ----

    async def _ask_user(self) -> StopReason | None:
        """Add the user's next message after an answer. Return ANSWERED if there is none."""
        if self.task.user is None:
            return StopReason.ANSWERED
        start_s, time_left_s = self.context.elapsed_s(), self._budget().turn_time_left_s
        try:
            said = await ask_user(self.task.user, self.messages, self.context.runner, time_left_s)
        except UserFailed as failed:
            self.error = str(failed)
            return StopReason.USER_ERROR
        finally:
            span = self._span("user", "user", start_s)
            self.turns[-1] = replace(self.turns[-1], user_span=span)
        return StopReason.ANSWERED if said is None else self._append_user_message(said)

    def _append_user_message(self, message: str) -> StopReason | None:
        """Append it if the model gets a turn to answer it; return what ends the trajectory."""
        last_token_id = self.last_token_id
        ids = user_suffix_ids(self.chat, message, self.tools, last_token_id=last_token_id)
        budget = self._budget()
        stop = budget.stop_before_turn() or (budget.tightest if len(ids) >= budget.room else None)
        if stop is None:
            self._append_suffix(ids, [{"role": "user", "content": message}])
        return stop

    # ---- pieces ----

    def _append_suffix(self, ids: list[int], messages: Sequence[dict[str, Any]]) -> None:
        self.turns[-1] = replace(self.turns[-1], suffix=Segment(token_ids=ids))
        self.messages += messages
        self.used = self.used.plus_suffix(len(ids))

    def _span(self, kind: SpanKind, name: str, start_s: float) -> Span:
        return Span(kind=kind, name=name, start_s=start_s, end_s=self.context.elapsed_s())
