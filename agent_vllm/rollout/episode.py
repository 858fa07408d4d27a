"""Tell one trajectory's story: check limits, sample, parse, run tools, append.

Owns the order of these steps; `budget.py` does the arithmetic of limits. Knows of no other
trajectory. Invariant: every turn's prompt is all ids so far, and the story ends with one
`StopReason`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent_vllm.environments import User, UserFailed, ask_user
from agent_vllm.errors import ChatTemplateError
from agent_vllm.rollout.budget import Budget
from agent_vllm.rollout.observations import with_results, with_user_message
from agent_vllm.rollout.sampler import TurnFailed, TurnSampler
from agent_vllm.rollout.story import Story
from agent_vllm.tools import Tool
from agent_vllm.types import CallRecord, Messages, StopReason, ToolCall, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutTask:
    """Hold one conversation to go on with, and what it goes on with."""

    messages: Messages
    tools: Mapping[str, Tool]  # by name
    user: User | None = None
    error: str | None = None  # why it can't begin


class Episode:
    """Make one trajectory; used once.

    Args:
        prompt_ids: of the task's messages.
        sampler: of its turns.
    """

    def __init__(self, task: RolloutTask, prompt_ids: Sequence[int], sampler: TurnSampler) -> None:
        self.task = task
        self.sampler = sampler
        self.context = sampler.context
        self.chat = sampler.chat
        self.tools = list(task.tools.values())
        self.story = Story.begin(prompt_ids, task.messages)
        self.turn_started_s = 0.0
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
            self.sampler.forget()
        self.context.status.num_finished += 1
        return self.story.trajectory(stop, thinking=self.sampler.thinking, error=self.error)

    async def _turn(self) -> StopReason | None:
        """Sample, parse, run tools, append. Return what ends the trajectory, or None."""
        self.turn_started_s = self.context.elapsed_s()
        max_new_tokens = self._budget().turn_tokens
        try:
            turn = await self.sampler.sample(
                self.story,
                self.tools,
                started_s=self.turn_started_s,
                max_new_tokens=max_new_tokens,
            )
        except TurnFailed as failed:
            self.error = failed.error
            return failed.reason
        self.story = turn.story
        if turn.is_cut:
            return self._budget().what_cut(max_new_tokens)
        if not turn.parsed.calls:
            return await self._ask_user()
        stop = self._budget().stop_before_calls()
        if stop is None:
            await self._run_calls(turn.parsed.calls)
            stop = self._append_results()
        return stop

    def _budget(self) -> Budget:
        return self.context.budget(self.story.used, self.turn_started_s)

    # ---- tools ----

    async def _run_calls(self, calls: Sequence[ToolCall]) -> None:
        """Run a turn's calls side by side; their results belong to the turn in call order."""
        time_left_s, status = self._budget().turn_time_left_s, self.context.status
        status.num_in_tools += 1
        try:
            records = await asyncio.gather(*(self._run_call(call, time_left_s) for call in calls))
        finally:
            status.num_in_tools -= 1
        self.story = self.story.plus_calls(records)

    async def _run_call(self, call: ToolCall, time_left_s: float | None) -> CallRecord:
        start_s = self.context.elapsed_s()
        with self.context.status.calling(call.name):
            [result] = await self.context.runner.run([call], self.task.tools, time_left_s)
        span = self.context.span("tool", call.name, start_s)
        return CallRecord(call=call, result=replace(result, call_id=call.id), span=span)

    def _append_results(self) -> StopReason | None:
        """Feed the turn's results back, cut to what fits; with no room at all they stay out."""
        results = [record.result for record in self.story.turns[-1].calls]
        budget = self._budget()
        stop = budget.stop_after_calls()
        if any(r.status == "ok" and self.task.tools[r.name].ends_episode for r in results):
            stop = StopReason.ENVIRONMENT_DONE
        shown = with_results(self.story, self.chat, self.tools, budget, is_last=stop is not None)
        if shown is None:
            return stop or budget.tightest
        self.story = shown
        return stop or self._budget().stop_before_turn()

    # ---- the simulated user ----

    async def _ask_user(self) -> StopReason | None:
        """Add the user's next message after an answer. Return ANSWERED if there is none."""
        if self.task.user is None:
            return StopReason.ANSWERED
        start_s, time_left_s = self.context.elapsed_s(), self._budget().turn_time_left_s
        try:
            said = await ask_user(
                self.task.user, self.story.messages, self.context.runner, time_left_s
            )
        except UserFailed as failed:
            self.error = str(failed)
            return StopReason.USER_ERROR
        finally:
            self.story = self.story.plus_user_span(self.context.span("user", "user", start_s))
        return StopReason.ANSWERED if said is None else self._append_user_message(said)

    def _append_user_message(self, message: str) -> StopReason | None:
        """Append it if the model gets a turn to answer it; return what ends the trajectory."""
        budget = self._budget()
        stop = budget.stop_before_turn()
        if stop is None:
            shown = with_user_message(self.story, self.chat, self.tools, budget, message)
            self.story = shown or self.story
            stop = budget.tightest if shown is None else None
        return stop
