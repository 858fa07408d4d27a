"""Make one trajectory of the requests that an agent sends with its key.

Owns which conversation a request continues, and its ids. Invariants: a conversation that extends an
answered one continues with the ids that were sampled; every sampled token is in one turn of the
trajectory or of one of its branches.
"""

import asyncio
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_vllm.errors import ChatTemplateError, ToolDefinitionError
from agent_vllm.gateway.fields import ChatRequest, Refused
from agent_vllm.gateway.history import History, Key
from agent_vllm.rollout import (
    Budget,
    NewTurn,
    Story,
    TurnFailed,
    TurnSampler,
    with_results,
    with_user_message,
)
from agent_vllm.settings import SamplingParams
from agent_vllm.tools import Tool, tools_by_name
from agent_vllm.types import CallRecord, StopReason, ToolCall, ToolResult, Trajectory

_FOREIGN_ROLES = {"user", "tool"}  # whose content may spell control tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Hold one sampled turn as the client gets it."""

    story: Story  # which ends with the turn
    calls: dict[str, ToolCall]  # [K], by the id that the client knows
    message: dict[str, Any]
    finish_reason: str  # the OpenAI API's
    num_prompt_tokens: int
    num_sampled_tokens: int


class Session:
    """Answer the requests of one agent run.

    Attributes:
        stop: what ended the trajectory, None while it goes on.
        error: why, if something failed.
    """

    def __init__(self, sampler: TurnSampler) -> None:
        self.sampler = sampler
        self.stop: StopReason | None = None
        self.error: str | None = None
        self._history: History[Answer] = History()
        self._stories: list[Story] = []  # of each answer, in the order in which they were sampled
        self._num_turns = 0  # begun
        self._num_calls = 0
        self._is_cut = False  # the latest turn, by a limit
        self._running: set[asyncio.Task[Any]] = set()

    async def answer(self, request: ChatRequest) -> Answer:
        """Sample the next turn of the request's conversation.

        Raises:
            Refused: the conversation can't be written, or the trajectory has ended.
        """
        if self.stop is not None:
            raise self._ended()
        started_s = self.sampler.context.elapsed_s()
        try:
            tools = offered_tools(tuple(json.dumps(t.shown) for t in request.tools or ()))
            story, key = self._place(request, tools, started_s)
        except (ChatTemplateError, ToolDefinitionError) as error:
            raise Refused(str(error)) from error
        budget = self._budget(story, started_s)
        self._end_if(budget.stop_before_turn())
        max_new_tokens = min(budget.turn_tokens, request.token_limit or budget.turn_tokens)
        turn = await self._sample(story, tools, request, started_s, max_new_tokens)
        self._stories.append(turn.story)
        self._is_cut = turn.is_cut
        if turn.is_cut and max_new_tokens == budget.turn_tokens:
            self.end(self._budget(turn.story, started_s).what_cut(max_new_tokens))
        return self._remember(key, turn, self._sampling(request).stop_strings)

    def end(self, stop: StopReason, error: str | None = None) -> None:
        """End the trajectory; what ended it first counts."""
        if self.stop is None:
            self.stop, self.error = stop, error

    async def close(self) -> None:
        """Give up the requests that nobody waits for any more."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        self.sampler.forget()

    def trajectory(self, output: Any = None) -> Trajectory:
        """Return the conversation that was answered last, with the others as its branches."""
        if not self._stories:
            self.end(StopReason.AGENT_ERROR, "The agent sent no request that could be answered.")
        self.end(StopReason.TURN_LENGTH if self._is_cut else StopReason.ANSWERED)
        # no row may be empty
        empty = Story.begin([self.sampler.chat.end_token_ids[0]], [])
        main, *others = told_once(self._stories) or [empty]
        trajectory = self._as_trajectory(main)
        branches = [self._as_trajectory(story) for story in others]
        return replace(trajectory, branches=branches, output=output)

    def _as_trajectory(self, story: Story) -> Trajectory:
        assert self.stop is not None
        return story.trajectory(self.stop, thinking=self.sampler.thinking, error=self.error)

    # ---- one request ----

    def _place(
        self, request: ChatRequest, tools: Sequence[Tool], started_s: float
    ) -> tuple[Story, Key]:
        """Return the story that waits for the turn, and the key of its conversation."""
        shown = json.dumps([tool.schema_text for tool in tools])
        place = self._history.find(request.messages, shown)
        story = None
        if place.answered is not None:
            story = self._continued(place.answered, place.new_messages, tools, started_s)
        if story is None:
            messages = [self._with_data(message) for message in place.messages]
            ids = self.sampler.chat.prompt_ids(messages, tools)
            story = Story.begin(ids, request.messages)
        return story, place.key

    def _with_data(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message; control tokens that it spells stay text if it isn't the model's."""
        if message.get("role") not in _FOREIGN_ROLES:
            return message
        return {**message, "content": self.sampler.chat.as_data(message.get("content", ""))}

    def _continued(
        self,
        answered: Answer,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool],
        started_s: float,
    ) -> Story | None:
        """Return the answered story with these messages, or None if only a new prompt holds them.

        Raises:
            Refused: a limit ended the trajectory.
        """
        if (calls := calls_of(answered, messages)) is not None:
            return self._with_calls(answered.story, calls, tools, started_s)
        is_user = [message["role"] for message in messages] == ["user"]
        if not is_user or answered.calls:
            return None
        budget = self._budget(answered.story, started_s)
        self._end_if(budget.stop_before_turn())
        text = messages[0].get("content", "")
        try:
            story = with_user_message(answered.story, self.sampler.chat, tools, budget, text)
        except ChatTemplateError:  # the template can't be extended so
            return None
        self._end_if(None if story is not None else budget.tightest)
        return story

    def _with_calls(
        self, story: Story, calls: Sequence[CallRecord], tools: Sequence[Tool], started_s: float
    ) -> Story:
        """Return the story with its calls and what they returned, as our own loop shows it."""
        self._end_if(self._budget(story, started_s).stop_before_calls())
        story = story.plus_calls(calls)
        budget = self._budget(story, started_s)
        stop = budget.stop_after_calls()
        chat, is_last = self.sampler.chat, stop is not None
        shown = with_results(story, chat, tools, budget, is_last=is_last)
        if is_last or shown is None:
            self._stories.append(shown or story)
            self._end_if(stop or budget.tightest)
        return shown or story

    async def _sample(
        self,
        story: Story,
        tools: Sequence[Tool],
        request: ChatRequest,
        started_s: float,
        max_new_tokens: int,
    ) -> NewTurn:
        task = asyncio.current_task()
        assert task is not None
        self._num_turns += 1
        self._running.add(task)
        try:
            return await self.sampler.sample(
                story,
                tools,
                started_s=started_s,
                max_new_tokens=max_new_tokens,
                sampling=self._sampling(request),
            )
        except TurnFailed as failed:
            self.end(failed.reason, failed.error)
            raise self._ended() from failed
        finally:
            self._running.discard(task)

    def _remember(self, key: Key, turn: NewTurn, stop_strings: Sequence[str]) -> Answer:
        """Return the turn as the client gets it, and remember what it answered."""
        story = turn.story
        readable = [call for call in turn.parsed.calls if call.error is None]
        calls = {f"call{self._num_calls + i:05d}": call for i, call in enumerate(readable)}
        self._num_calls += len(calls)
        num_sampled = len(story.turns[-1].segment.token_ids)
        answer = Answer(
            story=story,
            calls=calls,
            message=message_for_client(turn.parsed.message, calls, stop_strings),
            finish_reason="length" if turn.is_cut else "tool_calls" if calls else "stop",
            num_prompt_tokens=story.used.num_tokens - num_sampled,
            num_sampled_tokens=num_sampled,
        )
        sent = answer.message
        without_thinking = {k: v for k, v in sent.items() if k != "reasoning_content"}
        # Clients drop the thinking, and write a stop string back that ended the turn.
        self._history.add(key, [[sent], [without_thinking], [turn.parsed.message]], answer)
        return answer

    # ---- limits ----

    def _end_if(self, stop: StopReason | None) -> None:
        if stop is not None:
            self.end(stop)
            raise self._ended()

    def _ended(self) -> Refused:
        why = f": {self.error}" if self.error else "."
        return Refused(f"The trajectory has ended as {self.stop}{why}", code=str(self.stop))

    def _budget(self, story: Story, started_s: float) -> Budget:
        """Return what is left; the turns of all branches count."""
        used = replace(story.used, num_turns=self._num_turns)
        return self.sampler.context.budget(used, started_s)

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        own = self.sampler.context.sampling
        return replace(own, stop_strings=(*own.stop_strings, *request.stop_strings))


def calls_of(answered: Answer, messages: Sequence[dict[str, Any]]) -> list[CallRecord] | None:
    """Return the answer's calls with the results that these messages hold, in call order.

    None if they are anything but one result per call.
    """
    if not messages or any(message.get("role") != "tool" for message in messages):
        return None
    contents = {message.get("tool_call_id"): message.get("content", "") for message in messages}
    if contents.keys() != answered.calls.keys() or len(contents) != len(messages):
        return None
    results = {
        known_id: ToolResult(
            name=call.name, content=contents[known_id], status="ok", call_id=call.id
        )
        for known_id, call in answered.calls.items()
    }
    return [CallRecord(call=answered.calls[i], result=result) for i, result in results.items()]


def message_for_client(
    message: dict[str, Any], calls: dict[str, ToolCall], stop_strings: Sequence[str]
) -> dict[str, Any]:
    """Return a sampled message in the OpenAI API's form, without the stop string that ended it."""
    content = message["content"]
    cuts = [content.find(string) for string in stop_strings]
    content = content[: min((cut for cut in cuts if cut >= 0), default=len(content))]
    sent: dict[str, Any] = {"role": "assistant", "content": content or None}
    if message.get("reasoning_content"):
        sent["reasoning_content"] = message["reasoning_content"]
    if calls:
        sent["tool_calls"] = [
            {
                "id": known_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments or {})},
            }
            for known_id, call in calls.items()
        ]
    return sent


def told_once(stories: Sequence[Story]) -> list[Story]:
    """Return the last story whole, and of the others what no later one tells, in their order."""
    told: set[int] = set()  # segments, by id: branches share them
    found: list[Story] = []
    for story in reversed(stories):
        segments = [id(turn.segment) for turn in story.turns]
        num_told = sum(segment in told for segment in segments)  # at its beginning
        if num_told < len(segments):
            found.append(story.without_turns(num_told))
            told.update(segments)
    return [*found[:1], *reversed(found[1:])]


@functools.lru_cache(maxsize=256)
def offered_tools(schemas: tuple[str, ...]) -> list[Tool]:
    """Return the tools that a client describes; the client runs them.

    Raises:
        ToolDefinitionError: a schema is no tool's, or two have one name.
    """
    tools = [Tool(schema=json.loads(schema), function=_run_by_client) for schema in schemas]
    return list(tools_by_name(tools).values())


def _run_by_client(**_: Any) -> None:
    raise NotImplementedError
