"""The rollout: one coroutine a trajectory, many at once, each at its own pace.

Owns the story of a trajectory, its limits and their order. The engine batches whoever waits for a
token; there is no barrier between turns. Invariant: every turn's prompt is all ids so far, and
every trajectory ends with one `StopReason`, whatever happens to the others.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agent_vllm.blocking import run_blocking
from agent_vllm.chat import ChatFormat
from agent_vllm.engines.base import RolloutEngine
from agent_vllm.errors import EngineError, InvalidRequestError
from agent_vllm.tools import Tool, ToolInterrupted, ToolRunner, tools_by_name
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

Tools = Sequence[Tool | Callable[..., Any]]


@dataclass(kw_only=True)
class RolloutStatus:
    """How far a rollout is, kept up to date while it runs; for whoever shows progress."""

    num_trajectories: int = 0
    num_finished: int = 0
    num_in_tools: int = 0
    num_sampled_tokens: int = 0
    num_turns: int = 0  # of all trajectories together
    max_turn: int = 0  # of the trajectory that is furthest
    running_calls: dict[object, tuple[str, float]] = field(default_factory=dict)  # name, start
    started_s: float = field(default_factory=time.monotonic)

    @property
    def num_generating(self) -> int:
        return self.num_trajectories - self.num_finished - self.num_in_tools

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds to go if the others finish at the pace so far; None before the first has."""
        if self.num_finished == 0:
            return None
        num_left = self.num_trajectories - self.num_finished
        return self.elapsed_s * num_left / self.num_finished

    @property
    def slowest_call(self) -> tuple[str, float] | None:
        """The tool call that has run longest of those running now: its name and seconds."""
        for name, start_s in list(self.running_calls.values()):  # in order of their start
            return name, time.monotonic() - start_s
        return None

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """A tool call runs for as long as the block does."""
        call = object()
        self.running_calls[call] = (name, time.monotonic())
        try:
            yield
        finally:
            del self.running_calls[call]


def rollout_batch(
    engine: RolloutEngine,
    chat: ChatFormat,
    messages_batch: Sequence[Messages],
    tools_batch: Sequence[Tools | None] | None = None,
    num_generations: int = 1,
    **options: Any,
) -> list[Trajectory]:
    """`rollout_batch_async` for code that is not async; works in a script, a thread, a notebook."""
    return run_blocking(
        rollout_batch_async(engine, chat, messages_batch, tools_batch, num_generations, **options)
    )


def rollout_single(
    engine: RolloutEngine,
    chat: ChatFormat,
    messages: Messages,
    tools: Tools | None = None,
    **options: Any,
) -> Trajectory:
    """One trajectory of one conversation; `options` are those of `rollout_batch_async`."""
    return rollout_batch(engine, chat, [messages], [tools], **options)[0]


async def rollout_single_async(
    engine: RolloutEngine,
    chat: ChatFormat,
    messages: Messages,
    tools: Tools | None = None,
    **options: Any,
) -> Trajectory:
    """The awaitable form of `rollout_single`."""
    return (await rollout_batch_async(engine, chat, [messages], [tools], **options))[0]


async def rollout_batch_async(
    engine: RolloutEngine,
    chat: ChatFormat,
    messages_batch: Sequence[Messages],
    tools_batch: Sequence[Tools | None] | None = None,
    num_generations: int = 1,
    *,
    users_batch: Sequence[User | None] | None = None,
    limits: Limits | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop_strings: Sequence[str] = (),
    thinking_ratio: float | None = None,
    seed: int | None = None,
    status: RolloutStatus | None = None,
) -> list[Trajectory]:
    """Sample G trajectories of each of B conversations.

    Args:
        messages_batch: B conversations, each waiting for the assistant; never written to.
        tools_batch: each conversation's own tools (None: no tools); None for no tools at all.
        num_generations: G.
        users_batch: each conversation's simulated user (None: none), asked for its next message
            after every answer; None for no users at all. A user belongs to one trajectory: with
            users, repeat the conversation instead of raising G.
        limits: of each trajectory; `Limits()` by default.
        temperature, top_p, top_k, min_p, stop_strings: sampling, as in `RolloutEngine.generate`.
        thinking_ratio: share of trajectories with the template's thinking switch on, the others
            have it off; None leaves the switch alone.
        seed: same seed, same trajectories, whatever the tools' timing; the engine's own stream of
            seeds by default.
        status: brought up to date while the rollout runs.

    Returns:
        B*G trajectories, prompt-major: all G of conversation 0, then of conversation 1, ...

    Raises:
        ValueError: batch sizes differ, a conversation is empty, or G trajectories share a user.
        ToolDefinitionError, ChatTemplateError: a tool or conversation can't be written for the
            model.
    """
    tools_batch = [None] * len(messages_batch) if tools_batch is None else tools_batch
    users_batch = [None] * len(messages_batch) if users_batch is None else users_batch
    _check_batch(messages_batch, tools_batch, num_generations, thinking_ratio)
    _check_users(chat, messages_batch, users_batch, num_generations)
    limits = limits or Limits()
    seed = engine.next_seed() if seed is None else seed
    status = status or RolloutStatus()
    status.num_trajectories += len(messages_batch) * num_generations
    runner = ToolRunner(timeout_s=limits.tool_timeout_s)
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "stop_strings": stop_strings,
    }
    named_tools = _named_tools(tools_batch)
    started_s = time.monotonic()
    episodes = [
        _Episode(
            engine=engine,
            chat=chat,
            messages=messages,
            tools=tools,
            user=user,
            limits=limits,
            sampling=sampling,
            thinking_ratio=thinking_ratio,
            runner=runner,
            random=random.Random(f"{seed}/{row}/{generation}"),
            status=status,
            started_s=started_s,
        )
        for row, (messages, tools, user) in enumerate(
            zip(messages_batch, named_tools, users_batch, strict=True)
        )
        for generation in range(num_generations)
    ]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(episode.run()) for episode in episodes]
    except BaseExceptionGroup as errors:
        error = _first(errors)
        raise (KeyboardInterrupt() if isinstance(error, ToolInterrupted) else error) from None
    finally:
        runner.close()
    return [task.result() for task in tasks]


class _Episode:
    """One trajectory in the making; used once."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        chat: ChatFormat,
        messages: Messages,
        tools: Mapping[str, Tool],
        user: User | None,
        limits: Limits,
        sampling: Mapping[str, Any],
        thinking_ratio: float | None,
        runner: ToolRunner,
        random: random.Random,
        status: RolloutStatus,
        started_s: float,
    ) -> None:
        self.thinking = None if thinking_ratio is None else random.random() < thinking_ratio
        self.chat = chat if self.thinking is None else chat.with_thinking(self.thinking)
        self.engine = engine
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
        self.prompt_ids = self.chat.prompt_ids(self.messages, list(tools.values()))
        self.ids = list(self.prompt_ids)  # the whole sequence, prompt and completion
        self.segments: list[Segment] = []
        self.turn_outputs: list[str] = []
        self.tool_results: list[ToolResult] = []
        self.spans: list[Span] = []
        self.num_tool_rounds = 0
        self.num_invalid_in_a_row = 0
        self.error: str | None = None

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
        try:
            async with asyncio.timeout(self._time_left()) as deadline:
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
        return self.engine.max_model_len - len(self.ids)

    def _completion_left(self) -> int:
        limit = self.limits.max_completion_tokens
        used = len(self.ids) - len(self.prompt_ids)
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

    # ---- steps ----

    async def _generate(self, budget: int) -> Completion:
        start_s = self._elapsed_s()
        completion = await self.engine.generate(
            list(self.ids),
            max_new_tokens=budget,
            stop_token_ids=self.chat.end_token_ids,
            seed=self.random.getrandbits(31),
            **self.sampling,
        )
        self.status.num_sampled_tokens += len(completion.token_ids)
        self.status.num_turns += 1
        self.status.max_turn = max(self.status.max_turn, len(self.turn_outputs) + 1)
        name = f"turn {len(self.turn_outputs)}"
        self.spans.append(Span(kind="model", name=name, start_s=start_s, end_s=self._elapsed_s()))
        return completion

    def _append_turn(self, completion: Completion) -> ParsedTurn:
        turn = self.chat.parse(
            completion.token_ids,
            self.ids,
            list(self.tools.values()),
            is_cut=completion.finish_reason == "length",
        )
        self.segments.append(
            Segment(
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                policy_version=completion.policy_version,
            )
        )
        self.ids += completion.token_ids
        self.turn_outputs.append(self.chat.decode_turn(completion.token_ids))
        self.messages.append(turn.message)
        return turn

    async def _run_tools(self, turn: ParsedTurn) -> list[ToolResult]:
        time_left_s = self._time_left()
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
            said = await ask_user(self.user, self.messages, self.runner, self._time_left())
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
        ids = user_suffix_ids(self.chat, message, tools, last_token_id=self.ids[-1])
        stop = self._stop_before_turn() or (self._tightest() if len(ids) >= self._room() else None)
        if stop is None:
            self.segments.append(Segment(token_ids=ids))
            self.ids += ids
            self.messages.append({"role": "user", "content": message})
        return stop

    def _append_observation(self, results: list[ToolResult]) -> StopReason | None:
        """Feed the results back, cut to what fits; with no room at all they stay out."""
        stop = self._stop_after(results)
        suffix_ids, shown = self._fit(results, is_last=stop is not None)
        if suffix_ids is None:
            return stop or self._tightest()
        self.segments.append(Segment(token_ids=suffix_ids))
        self.ids += suffix_ids
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
            last_token_id=self.ids[-1],
            add_generation_prompt=not is_last,
        )

    def _truncate(self, results: list[ToolResult], max_tokens: int) -> list[ToolResult]:
        return [replace(r, content=self.chat.truncate(r.content, max_tokens)) for r in results]

    def _tightest(self) -> StopReason:
        if self._completion_left() < self._context_left():
            return StopReason.COMPLETION_BUDGET
        return StopReason.CONTEXT_FULL


def _check_batch(
    messages_batch: Sequence[Messages],
    tools_batch: Sequence[Tools | None],
    num_generations: int,
    thinking_ratio: float | None,
) -> None:
    if len(messages_batch) != len(tools_batch):
        raise ValueError(
            "`messages_batch` and `tools_batch` must have one length, got "
            f"{len(messages_batch)} and {len(tools_batch)}."
        )
    for row, messages in enumerate(messages_batch):
        if not messages:
            raise ValueError(f"Conversation {row} is empty; it needs at least one message.")
    if num_generations < 1:
        raise ValueError(f"`num_generations` must be 1 or more, got {num_generations}.")
    if thinking_ratio is not None and not 0 <= thinking_ratio <= 1:
        raise ValueError(f"`thinking_ratio` must be in [0, 1], got {thinking_ratio}.")


def _check_users(
    chat: ChatFormat,
    messages_batch: Sequence[Messages],
    users_batch: Sequence[User | None],
    num_generations: int,
) -> None:
    if len(messages_batch) != len(users_batch):
        raise ValueError(
            "`messages_batch` and `users_batch` must have one length, got "
            f"{len(messages_batch)} and {len(users_batch)}."
        )
    if num_generations > 1 and any(user is not None for user in users_batch):
        raise ValueError(
            f"`num_generations` must be 1 with users, got {num_generations}: each trajectory needs "
            "a user of its own. Repeat the conversation."
        )
    if any(user is not None for user in users_batch):
        user_suffix_ids(chat, "Hello.")  # refuses templates that can't be used so


def _named_tools(tools_batch: Sequence[Tools | None]) -> list[dict[str, Tool]]:
    """Each row's tools by name; rows that share a list share the work."""
    named: dict[int, dict[str, Tool]] = {}
    for tools in tools_batch:
        if id(tools) not in named:
            named[id(tools)] = tools_by_name(tools)
    return [named[id(tools)] for tools in tools_batch]


def _first(errors: BaseExceptionGroup) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
