"""One trajectory's story: check limits, generate, parse, run tools, append.

Owns the limits of a trajectory and their order; knows of no other trajectory. Invariant: every
turn's prompt is all ids so far, and the story ends with one `StopReason`.
"""

import asyncio
import functools
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent_vllm.chat import ChatFormat
from agent_vllm.engines.base import RolloutEngine
from agent_vllm.errors import EngineDeadError, EngineError, InvalidRequestError
from agent_vllm.status import RolloutStatus
from agent_vllm.tools import Tool, ToolRunner
from agent_vllm.types import (
    Completion,
    Limits,
    Messages,
    ParsedTurn,
    Segment,
    Span,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
)
from agent_vllm.user_turns import User, UserFailed, ask_user, user_suffix_ids


class Episode:
    """One trajectory in the making; used once."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        chat: ChatFormat,
        messages: Messages,
        prompt_ids: list[int],
        tools: Mapping[str, Tool],
        user: User | None,
        limits: Limits,
        sampling: Mapping[str, Any],
        thinking: bool | None,
        runner: ToolRunner,
        random: random.Random,
        status: RolloutStatus,
        started_s: float,
        name: str = "",
    ) -> None:
        self.name = name
        self.engine = engine
        self.chat = chat
        self.thinking = thinking
        self.tools = tools
        self.user = user
        self.limits = limits
        self.sampling = sampling
        self.runner = runner
        self.random = random
        self.status = status
        self.started_s = started_s
        self.messages = [dict(message) for message in messages]
        self.num_prompt_messages = len(self.messages)
        self.prompt_ids = list(prompt_ids)
        self.num_ids = len(prompt_ids)  # of the whole sequence, prompt and completion
        self.segments: list[Segment] = []
        self.turn_outputs: list[str] = []
        self.tool_results: list[ToolResult] = []
        self.spans: list[Span] = []
        self.num_tool_rounds = 0
        self.num_invalid_in_a_row = 0
        self.turn_started_s = 0.0
        self.error: str | None = None

    def __str__(self) -> str:
        return self.name

    async def run(self) -> Trajectory:
        stop = self._stop_before_turn()
        while stop is None:
            stop = await self._turn()
        self.status.num_finished += 1
        return Trajectory(
            prompt_ids=self.prompt_ids,
            segments=self.segments,
            stop_reason=stop,
            messages=self.messages,
            num_prompt_messages=self.num_prompt_messages,
            turn_outputs=self.turn_outputs,
            tool_results=self.tool_results,
            spans=self.spans,
            thinking=self.thinking,
            error=self.error,
        )

    async def _turn(self) -> StopReason | None:
        """Generate, parse, run tools, append. Returns what ends the trajectory, if anything."""
        budget = self._turn_budget()
        self.turn_started_s = self._elapsed_s()
        deadline = asyncio.timeout(self._turn_time_left())
        try:
            async with deadline:
                completion = await self._generate(budget)
        except (EngineError, InvalidRequestError) as error:
            self.error = str(error)
            return StopReason.ENGINE_ERROR
        except TimeoutError:
            if deadline.expired():
                return StopReason.DEADLINE
            raise
        turn = self._append_turn(completion)
        if completion.finish_reason == "length":
            return self._what_cut(budget)
        if not turn.calls:
            return await self._ask_user()
        if self.num_tool_rounds == self.limits.max_tool_rounds:
            return StopReason.MAX_TURNS
        if self._time_left() == 0.0:
            return StopReason.DEADLINE
        results = await self._run_tools(turn)
        return self._append_observation(results)

    # ---- limits ----

    def _stop_before_turn(self) -> StopReason | None:
        if len(self.turn_outputs) >= self.limits.max_turns:
            return StopReason.MAX_TURNS
        if self._time_left() == 0.0:
            return StopReason.DEADLINE
        return self._what_is_full()

    def _what_is_full(self) -> StopReason | None:
        if self._context_left() <= 0:
            return StopReason.CONTEXT_FULL
        if self._completion_left() <= 0:
            return StopReason.COMPLETION_BUDGET
        return None

    def _context_left(self) -> int:
        return self.engine.max_model_len - self.num_ids

    def _completion_left(self) -> int:
        limit = self.limits.max_completion_tokens
        used = self.num_ids - len(self.prompt_ids)
        return self._context_left() if limit is None else limit - used

    def _room(self) -> int:
        return min(self._completion_left(), self._context_left())

    def _turn_budget(self) -> int:
        room = self._room()
        return room if self.limits.max_new_tokens is None else min(self.limits.max_new_tokens, room)

    def _what_cut(self, budget: int) -> StopReason:
        """Which limit a turn of `budget` tokens ran into."""
        if budget == self.limits.max_new_tokens:
            return StopReason.TURN_LENGTH
        return self._what_is_full() or StopReason.TURN_LENGTH

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def _time_left(self) -> float | None:
        if self.limits.deadline_s is None:
            return None
        return max(self.limits.deadline_s - self._elapsed_s(), 0.0)

    def _turn_time_left(self) -> float | None:
        """Until this turn's deadline or the trajectory's, whichever comes first."""
        time_left_s, limit_s = self._time_left(), self.limits.turn_deadline_s
        if limit_s is None:
            return time_left_s
        turn_left_s = max(self.turn_started_s + limit_s - self._elapsed_s(), 0.0)
        return turn_left_s if time_left_s is None else min(turn_left_s, time_left_s)

    # ---- steps ----

    def _ids(self) -> list[int]:
        """The whole sequence. Put together for each turn: a trajectory in a tool holds it once."""
        ids = list(self.prompt_ids)
        for segment in self.segments:
            ids += segment.token_ids
        return ids

    def _append(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.num_ids += len(segment.token_ids)

    async def _generate(self, budget: int) -> Completion:
        start_s = self._elapsed_s()
        completion = await self._sample(budget)
        self.status.num_sampled_tokens += len(completion.token_ids)
        self.status.num_turns += 1
        self.status.max_turn = max(self.status.max_turn, len(self.turn_outputs) + 1)
        name = f"turn {len(self.turn_outputs)}"
        self.spans.append(Span(kind="model", name=name, start_s=start_s, end_s=self._elapsed_s()))
        return completion

    async def _sample(self, budget: int) -> Completion:
        """One turn's tokens; a request that the engine failed is made once more.

        With the same seed: a fault then changes nothing of what is sampled, and tokens that lead to
        one are not drawn away from.
        """
        ask = functools.partial(
            self.engine.generate,
            self._ids(),
            max_new_tokens=budget,
            stop_token_ids=self.chat.end_token_ids,
            seed=self.random.getrandbits(31),
            affinity=self,
            **self.sampling,
        )
        try:
            return await ask()
        except EngineDeadError:
            raise
        except EngineError:
            self.status.num_retries += 1
            return await ask()

    def _append_turn(self, completion: Completion) -> ParsedTurn:
        turn = self.chat.parse(
            completion.token_ids,
            self._ids(),
            list(self.tools.values()),
            is_cut=completion.finish_reason == "length",
        )
        self._append(
            Segment(
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                policy_version=completion.policy_version,
                token_versions=completion.token_versions,
            )
        )
        self.turn_outputs.append(self.chat.decode_turn(completion.token_ids))
        self.messages.append(turn.message)
        return turn

    async def _run_tools(self, turn: ParsedTurn) -> list[ToolResult]:
        time_left_s = self._turn_time_left()
        self.num_tool_rounds += 1
        self.status.num_in_tools += 1
        try:
            timed = await asyncio.gather(*(self._run_call(c, time_left_s) for c in turn.calls))
        finally:
            self.status.num_in_tools -= 1
        results = [result for result, _ in timed]
        self.spans += [span for _, span in timed]
        for result in results:
            is_invalid = result.status == "invalid"
            self.num_invalid_in_a_row = self.num_invalid_in_a_row + 1 if is_invalid else 0
        self.tool_results += results
        return results

    async def _run_call(self, call: ToolCall, time_left_s: float | None) -> tuple[ToolResult, Span]:
        start_s = self._elapsed_s()
        with self.status.calling(call.name):
            [result] = await self.runner.run([call], self.tools, time_left_s)
        span = Span(kind="tool", name=call.name, start_s=start_s, end_s=self._elapsed_s())
        return replace(result, call_id=call.id), span

    async def _ask_user(self) -> StopReason | None:
        """After an answer: the user's next message, or the end."""
        if self.user is None:
            return StopReason.ANSWERED
        start_s = self._elapsed_s()
        try:
            said = await ask_user(self.user, self.messages, self.runner, self._turn_time_left())
        except UserFailed as failed:
            self.error = str(failed)
            return StopReason.USER_ERROR
        finally:
            self.spans.append(
                Span(kind="tool", name="user", start_s=start_s, end_s=self._elapsed_s())
            )
        return StopReason.ANSWERED if said is None else self._append_user_message(said)

    def _append_user_message(self, message: str) -> StopReason | None:
        """Only where the model gets a turn to answer it."""
        tools = list(self.tools.values())
        ids = user_suffix_ids(self.chat, message, tools, last_token_id=self._ids()[-1])
        stop = self._stop_before_turn() or (self._tightest() if len(ids) >= self._room() else None)
        if stop is None:
            self._append(Segment(token_ids=ids))
            self.messages.append({"role": "user", "content": message})
        return stop

    def _append_observation(self, results: list[ToolResult]) -> StopReason | None:
        """Feed the results back, cut to what fits; with no room at all they stay out."""
        stop = self._stop_after(results)
        suffix_ids, shown = self._fit(results, is_last=stop is not None)
        if suffix_ids is None:
            return stop or self._tightest()
        self._append(Segment(token_ids=suffix_ids))
        self.messages += [result.message for result in shown]
        return stop or self._stop_before_turn()

    def _stop_after(self, results: list[ToolResult]) -> StopReason | None:
        if any(r.status == "ok" and self.tools[r.name].ends_episode for r in results):
            return StopReason.ENVIRONMENT_DONE
        if (
            self.limits.max_invalid_calls is not None
            and self.num_invalid_in_a_row >= self.limits.max_invalid_calls
        ):
            return StopReason.INVALID_CALLS
        return StopReason.MAX_TURNS if len(self.turn_outputs) >= self.limits.max_turns else None

    def _fit(
        self, results: list[ToolResult], *, is_last: bool
    ) -> tuple[list[int] | None, list[ToolResult]]:
        """The suffix that leaves room for a next token, and the results as it shows them."""
        room = self._room() - (0 if is_last else 1)
        if self.limits.max_tool_result_tokens is not None:
            results = self._truncate(results, self.limits.max_tool_result_tokens)
        suffix_ids = self._suffix_ids(results, is_last)
        if len(suffix_ids) <= room:
            return suffix_ids, results
        frame = self._suffix_ids([replace(result, content="") for result in results], is_last)
        share = (room - len(frame)) // len(results)
        if share > 0:
            results = self._truncate(results, share)
            suffix_ids = self._suffix_ids(results, is_last)
        return (suffix_ids if len(suffix_ids) <= room else None), results

    def _suffix_ids(self, results: list[ToolResult], is_last: bool) -> list[int]:
        return self.chat.suffix_ids(
            results,
            list(self.tools.values()),
            last_token_id=self._ids()[-1],
            add_generation_prompt=not is_last,
        )

    def _truncate(self, results: list[ToolResult], max_tokens: int) -> list[ToolResult]:
        return [replace(r, content=self.chat.truncate(r.content, max_tokens)) for r in results]

    def _tightest(self) -> StopReason:
        if self._completion_left() < self._context_left():
            return StopReason.COMPLETION_BUDGET
        return StopReason.CONTEXT_FULL
