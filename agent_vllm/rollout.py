"""The rollout: one coroutine a trajectory, many at once, each at its own pace.

Owns the story of a trajectory, its limits and their order. The engine batches whoever waits for a
token; there is no barrier between turns. Invariant: every turn's prompt is all ids so far, and
every trajectory ends with one `StopReason`, whatever happens to the others.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
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
    ToolResult,
    Trajectory,
)

Tools = Sequence[Tool | Callable[..., Any]]


@dataclass(kw_only=True)
class RolloutStatus:
    """How far a rollout is, kept up to date while it runs; for whoever shows progress."""

    num_trajectories: int = 0
    num_finished: int = 0
    num_in_tools: int = 0
    num_sampled_tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def num_generating(self) -> int:
        return self.num_trajectories - self.num_finished - self.num_in_tools

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s


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
        ValueError: batch sizes differ, or a conversation is empty.
        ToolDefinitionError, ChatTemplateError: a tool or conversation can't be written for the
            model.
    """
    tools_batch = [None] * len(messages_batch) if tools_batch is None else tools_batch
    _check_batch(messages_batch, tools_batch, num_generations, thinking_ratio)
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
    prompts = _Prompts(chat, messages_batch, _named_tools(tools_batch))
    started_s = time.monotonic()
    episodes = [
        _Episode(
            engine=engine,
            prompts=prompts,
            row=row,
            limits=limits,
            sampling=sampling,
            thinking_ratio=thinking_ratio,
            runner=runner,
            random=random.Random(f"{seed}/{row}/{generation}"),
            status=status,
            started_s=started_s,
        )
        for row in range(len(messages_batch))
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


class _Prompts:
    """What the samples of a row share; written and encoded once for all of them."""

    def __init__(
        self, chat: ChatFormat, messages: Sequence[Messages], tools: Sequence[dict[str, Tool]]
    ) -> None:
        self.messages = messages
        self.tools = tools
        self._formats: dict[bool | None, ChatFormat] = {None: chat}
        self._ids: dict[tuple[int, bool | None], list[int]] = {}

    def chat(self, thinking: bool | None) -> ChatFormat:
        if thinking is not None and thinking not in self._formats:
            self._formats[thinking] = self._formats[None].with_thinking(thinking)
        return self._formats[thinking]

    def ids(self, row: int, thinking: bool | None) -> list[int]:
        """A list of its own for each sample: `[P]`."""
        key = (row, thinking)
        if key not in self._ids:
            tools = list(self.tools[row].values())
            self._ids[key] = self.chat(thinking).prompt_ids(self.messages[row], tools)
        return list(self._ids[key])


class _Episode:
    """One trajectory in the making; used once."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        prompts: _Prompts,
        row: int,
        limits: Limits,
        sampling: Mapping[str, Any],
        thinking_ratio: float | None,
        runner: ToolRunner,
        random: random.Random,
        status: RolloutStatus,
        started_s: float,
    ) -> None:
        self.thinking = None if thinking_ratio is None else random.random() < thinking_ratio
        self.chat = prompts.chat(self.thinking)
        self.engine = engine
        self.tools = prompts.tools[row]
        self.limits = limits
        self.sampling = sampling
        self.runner = runner
        self.random = random
        self.status = status
        self.started_s = started_s
        self.messages = [dict(message) for message in prompts.messages[row]]
        self.num_prompt_messages = len(self.messages)
        self.prompt_ids = prompts.ids(row, self.thinking)
        self.num_ids = len(self.prompt_ids)  # of the whole sequence, prompt and completion
        self.segments: list[Segment] = []
        self.turn_outputs: list[str] = []
        self.tool_results: list[ToolResult] = []
        self.spans: list[Span] = []
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
            return StopReason.ANSWERED
        if self._num_tool_rounds == self.limits.max_tool_rounds:
            return StopReason.MAX_TURNS
        if self._time_left() == 0.0:
            return StopReason.DEADLINE
        results = await self._run_tools(turn)
        return self._append_observation(results)

    # ---- limits ----

    @property
    def _num_tool_rounds(self) -> int:
        return sum(not segment.is_sampled for segment in self.segments)

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
        completion = await self.engine.generate(
            self._ids(),
            max_new_tokens=budget,
            stop_token_ids=self.chat.end_token_ids,
            seed=self.random.getrandbits(31),
            **self.sampling,
        )
        self.status.num_sampled_tokens += len(completion.token_ids)
        name = f"turn {len(self.turn_outputs)}"
        self.spans.append(Span(kind="model", name=name, start_s=start_s, end_s=self._elapsed_s()))
        return completion

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
            )
        )
        self.turn_outputs.append(self.chat.decode_turn(completion.token_ids))
        self.messages.append(turn.message)
        return turn

    async def _run_tools(self, turn: ParsedTurn) -> list[ToolResult]:
        start_s = self._elapsed_s()
        self.status.num_in_tools += 1
        try:
            results = await self.runner.run(turn.calls, self.tools, self._time_left())
            results = [
                replace(result, call_id=call.id)
                for result, call in zip(results, turn.calls, strict=True)
            ]
        finally:
            self.status.num_in_tools -= 1
        name = ", ".join(call.name for call in turn.calls)
        self.spans.append(Span(kind="tool", name=name, start_s=start_s, end_s=self._elapsed_s()))
        for result in results:
            is_invalid = result.status == "invalid"
            self.num_invalid_in_a_row = self.num_invalid_in_a_row + 1 if is_invalid else 0
        self.tool_results += results
        return results

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
            last_token_id=self.segments[-1].token_ids[-1],
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
