"""The rollout: one coroutine a trajectory, many at once, each at its own pace.

The engine batches whoever waits for a token; there is no barrier between turns. Invariant: every
trajectory asked for comes back, in order, whatever happens to the others.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from agent_vllm.blocking import run_blocking
from agent_vllm.chat import ChatFormat
from agent_vllm.collector import rare_full_collections
from agent_vllm.engines.base import RolloutEngine
from agent_vllm.environments import User, user_suffix_ids
from agent_vllm.episode import Episode
from agent_vllm.status import RolloutStatus
from agent_vllm.tools import Tool, ToolInterrupted, ToolRunner, tools_by_name
from agent_vllm.types import Limits, Messages, StopReason, Trajectory

Tools = Sequence[Tool | Callable[..., Any]]


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
    failed_batch: Sequence[str | None] | None = None,
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
        failed_batch: why a conversation can't begin (None: it can), such as what its environment
            raised. Its trajectories end as `StopReason.ENVIRONMENT_ERROR` with no token sampled;
            all others are what they would have been.
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
    failed_batch = [None] * len(messages_batch) if failed_batch is None else failed_batch
    _check_batch(messages_batch, tools_batch, num_generations, thinking_ratio)
    _check_users(chat, messages_batch, users_batch, num_generations)
    _check_same_length("failed_batch", failed_batch, messages_batch)
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
    formats = _formats(chat, thinking_ratio)
    stories: list[Callable[[], Coroutine[Any, Any, Trajectory]]] = []
    for row, (messages, tools, user, failed) in enumerate(
        zip(messages_batch, named_tools, users_batch, failed_batch, strict=True)
    ):
        prompts = {}  # by thinking; the G samples of a prompt share the work
        for generation in range(num_generations):
            stream = random.Random(f"{seed}/{row}/{generation}")
            thinking = None if thinking_ratio is None else stream.random() < thinking_ratio
            if thinking not in prompts:
                offered = list(tools.values())
                prompts[thinking] = formats[thinking].prompt_ids(messages, offered)
            if failed is not None:
                story = partial(_not_begun, messages, prompts[thinking], failed, thinking, status)
                stories.append(story)
                continue
            episode = Episode(
                engine=engine,
                chat=formats[thinking],
                messages=messages,
                prompt_ids=prompts[thinking],
                tools=tools,
                user=user,
                limits=limits,
                sampling=sampling,
                thinking=thinking,
                runner=runner,
                random=stream,
                status=status,
                started_s=started_s,
                name=f"row {row}, sample {generation}",
            )
            stories.append(episode.run)
    try:
        with rare_full_collections():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(story()) for story in stories]
    except BaseExceptionGroup as errors:
        error = _first(errors)
        raise (KeyboardInterrupt() if isinstance(error, ToolInterrupted) else error) from None
    finally:
        runner.close()
    return [task.result() for task in tasks]


async def _not_begun(
    messages: Messages,
    prompt_ids: list[int],
    error: str,
    thinking: bool | None,
    status: RolloutStatus,
) -> Trajectory:
    status.num_finished += 1
    return Trajectory(
        prompt_ids=list(prompt_ids),
        segments=[],
        stop_reason=StopReason.ENVIRONMENT_ERROR,
        messages=[dict(message) for message in messages],
        num_prompt_messages=len(messages),
        thinking=thinking,
        error=error,
    )


def _formats(chat: ChatFormat, thinking_ratio: float | None) -> dict[bool | None, ChatFormat]:
    """The format by thinking; None where the switch is left alone."""
    if thinking_ratio is None:
        return {None: chat}
    return {thinking: chat.with_thinking(thinking) for thinking in (True, False)}


def _check_batch(
    messages_batch: Sequence[Messages],
    tools_batch: Sequence[Tools | None],
    num_generations: int,
    thinking_ratio: float | None,
) -> None:
    _check_same_length("tools_batch", tools_batch, messages_batch)
    for row, messages in enumerate(messages_batch):
        if not messages:
            raise ValueError(f"Conversation {row} is empty; it needs at least one message.")
    if num_generations < 1:
        raise ValueError(f"`num_generations` must be 1 or more, got {num_generations}.")
    if thinking_ratio is not None and not 0 <= thinking_ratio <= 1:
        raise ValueError(f"`thinking_ratio` must be in [0, 1], got {thinking_ratio}.")


def _check_same_length(name: str, batch: Sequence[Any], messages_batch: Sequence[Any]) -> None:
    if len(messages_batch) != len(batch):
        raise ValueError(
            f"`messages_batch` and `{name}` must have one length, got {len(messages_batch)} and "
            f"{len(batch)}."
        )


def _check_users(
    chat: ChatFormat,
    messages_batch: Sequence[Messages],
    users_batch: Sequence[User | None],
    num_generations: int,
) -> None:
    _check_same_length("users_batch", users_batch, messages_batch)
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
