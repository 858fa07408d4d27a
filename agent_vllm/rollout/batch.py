"""Roll out a batch: one coroutine per trajectory, each at its own pace.

The engine batches all that wait for a token; there is no barrier between turns. Invariant: every
trajectory that was asked for is returned, in order, whatever happens to the others.
"""

import asyncio
import random
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from agent_vllm.blocking import run_blocking
from agent_vllm.chat import ChatFormat
from agent_vllm.engines.base import RolloutEngine
from agent_vllm.environments import User, user_suffix_ids
from agent_vllm.errors import ChatTemplateError, ToolDefinitionError
from agent_vllm.rollout.episode import Episode, RolloutTask
from agent_vllm.rollout.garbage import rare_full_collections
from agent_vllm.rollout.sampler import RolloutContext, TurnSampler
from agent_vllm.rollout.status import RolloutStatus
from agent_vllm.settings import Limits, SamplingParams
from agent_vllm.tools import Tool, ToolInterrupted, ToolRunner, tools_by_name
from agent_vllm.types import Messages, Trajectory

T = TypeVar("T")
Tools = Sequence[Tool | Callable[..., Any]]


def rollout_batch(
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
    """Run `rollout_batch_async` from code that is not async: a script, a thread, a notebook."""
    rollout = rollout_batch_async(
        engine,
        chat,
        messages_batch,
        tools_batch,
        num_generations,
        users_batch=users_batch,
        failed_batch=failed_batch,
        limits=limits,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_strings=stop_strings,
        thinking_ratio=thinking_ratio,
        seed=seed,
        status=status,
    )
    return run_blocking(rollout)


def rollout_single(
    engine: RolloutEngine,
    chat: ChatFormat,
    messages: Messages,
    tools: Tools | None = None,
    *,
    user: User | None = None,
    limits: Limits | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop_strings: Sequence[str] = (),
    thinking_ratio: float | None = None,
    seed: int | None = None,
    status: RolloutStatus | None = None,
) -> Trajectory:
    """Sample one trajectory of one conversation. Keywords are those of `rollout_batch_async`, with
    one `user`.
    """
    rollout = rollout_single_async(
        engine,
        chat,
        messages,
        tools,
        user=user,
        limits=limits,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_strings=stop_strings,
        thinking_ratio=thinking_ratio,
        seed=seed,
        status=status,
    )
    return run_blocking(rollout)


async def rollout_single_async(
    engine: RolloutEngine,
    chat: ChatFormat,
    messages: Messages,
    tools: Tools | None = None,
    *,
    user: User | None = None,
    limits: Limits | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop_strings: Sequence[str] = (),
    thinking_ratio: float | None = None,
    seed: int | None = None,
    status: RolloutStatus | None = None,
) -> Trajectory:
    """Sample one trajectory of one conversation. The awaitable form of `rollout_single`."""
    (trajectory,) = await rollout_batch_async(
        engine,
        chat,
        [messages],
        [tools],
        users_batch=[user],
        limits=limits,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_strings=stop_strings,
        thinking_ratio=thinking_ratio,
        seed=seed,
        status=status,
    )
    return trajectory


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
        failed_batch: why a conversation can't begin (None: it can), such as the error that its
            environment raised. Its trajectories end as `StopReason.ENVIRONMENT_ERROR` with no
            token sampled; the others are not affected.
        limits: of each trajectory; `Limits()` by default.
        temperature, top_p, top_k, min_p, stop_strings: as in `SamplingParams`.
        thinking_ratio: share of trajectories with the template's thinking switch on, the others
            have it off; None leaves the switch alone.
        seed: same seed, same trajectories, whatever the tools' timing. By default the next of the
            engine's own.
        status: kept up to date while the rollout runs.

    Returns:
        B*G trajectories, prompt-major: all G of conversation 0, then of conversation 1, ...

    Raises:
        ValueError: batch sizes differ, a conversation is empty, G trajectories share a user, or a
            sampling value is out of range (`InvalidRequestError`).
        ToolDefinitionError: a tool can't be described to the model, or called by it.
        ChatTemplateError: the template can write none of the conversations. If it can't write some
            of them or their tools, their trajectories end as `StopReason.ENVIRONMENT_ERROR`.
    """
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop_strings=stop_strings
    )
    check_options(num_generations, thinking_ratio)
    tasks = _tasks(messages_batch, tools_batch, users_batch, failed_batch)
    _check_users(chat, tasks, num_generations)
    limits = limits or Limits()
    context = RolloutContext(
        engine=engine,
        sampling=sampling,
        limits=limits,
        runner=ToolRunner(timeout_s=limits.call_timeout_s),
        status=status or RolloutStatus(),
    )
    context.status.num_trajectories += len(tasks) * num_generations
    seed = engine.next_seed() if seed is None else seed
    episodes = list(_episodes(context, chat, tasks, num_generations, thinking_ratio, seed))
    return await run_all(episode.run() for episode in episodes)


async def run_all(runs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what the trajectories' coroutines return, in order; the first error ends all."""
    try:
        with rare_full_collections():
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(run) for run in runs]
    except BaseExceptionGroup as errors:
        error = _first(errors)
        raise (KeyboardInterrupt() if isinstance(error, ToolInterrupted) else error) from None
    return [task.result() for task in running]


def _episodes(
    context: RolloutContext,
    chat: ChatFormat,
    tasks: Sequence[RolloutTask],
    num_generations: int,
    thinking_ratio: float | None,
    seed: int,
) -> Iterator[Episode]:
    """Yield the G episodes of each task; those of one task share the work on its prompt."""
    formats = _formats(chat, thinking_ratio)
    prompts = [_prompts(chat, formats, task) for task in tasks]
    _refuse_if_none_is_written(prompts)
    options = (num_generations, thinking_ratio, seed)
    samplers = turn_samplers(context, chat, len(tasks), *options)
    for task, prompt, of_row in zip(tasks, prompts, samplers, strict=True):
        if isinstance(prompt, Exception):
            shown = [message for message in task.messages if isinstance(message, Mapping)]
            task = replace(task, messages=shown, error=task.error or str(prompt))
            prompt = {key: [chat.end_token_ids[0]] for key in formats}  # no row may be empty
        for sampler in of_row:
            yield Episode(task, prompt[sampler.thinking], sampler)


def turn_samplers(
    context: RolloutContext,
    chat: ChatFormat,
    num_rows: int,
    num_generations: int,
    thinking_ratio: float | None,
    seed: int,
) -> Iterator[list[TurnSampler]]:
    """Yield the samplers of each row's G trajectories; the same seed gives the same ones."""
    formats = _formats(chat, thinking_ratio)
    rollout = uuid.uuid4().hex[:8]
    for row in range(num_rows):
        of_row = []
        for generation in range(num_generations):
            seeds = random.Random(f"{seed}/{row}/{generation}")
            thinking = None if thinking_ratio is None else seeds.random() < thinking_ratio
            sampler = TurnSampler(
                context=context,
                chat=formats[thinking],
                thinking=thinking,
                affinity=f"rollout {rollout}, row {row}, sample {generation}",
                seeds=seeds,
            )
            of_row.append(sampler)
        yield of_row


def _prompts(
    chat: ChatFormat, formats: Mapping[bool | None, ChatFormat], task: RolloutTask
) -> dict[bool | None, list[int]] | Exception:
    """Return the ids of a task's prompt by thinking, or why it or its tools can't be written."""
    tools = list(task.tools.values())
    try:
        chat.check_tools(tools)
        return {thinking: f.prompt_ids(task.messages, tools) for thinking, f in formats.items()}
    except (ChatTemplateError, ToolDefinitionError) as error:
        return error


def _refuse_if_none_is_written(prompts: Sequence[Any]) -> None:
    """Raise the first error where every prompt has one: the fault is not one row's."""
    errors = [prompt for prompt in prompts if isinstance(prompt, Exception)]
    if errors and len(errors) == len(prompts):
        raise errors[0]


def _formats(chat: ChatFormat, thinking_ratio: float | None) -> dict[bool | None, ChatFormat]:
    """Return the formats that can be drawn, by thinking; None where the switch is left alone."""
    if thinking_ratio is None:
        return {None: chat}
    shares = {True: thinking_ratio, False: 1 - thinking_ratio}
    return {thinking: chat.with_thinking(thinking) for thinking, share in shares.items() if share}


def _tasks(
    messages_batch: Sequence[Messages],
    tools_batch: Sequence[Tools | None] | None,
    users_batch: Sequence[User | None] | None,
    failed_batch: Sequence[str | None] | None,
) -> list[RolloutTask]:
    tools_batch = _column("tools_batch", tools_batch, messages_batch)
    users_batch = _column("users_batch", users_batch, messages_batch)
    failed_batch = _column("failed_batch", failed_batch, messages_batch)
    for row, messages in enumerate(messages_batch):
        if not messages:
            raise ValueError(f"Conversation {row} is empty; it needs at least one message.")
    columns = zip(messages_batch, _named_tools(tools_batch), users_batch, failed_batch, strict=True)
    return [
        RolloutTask(messages=messages, tools=tools, user=user, error=error)
        for messages, tools, user, error in columns
    ]


def _column(
    name: str, values: Sequence[T | None] | None, messages_batch: Sequence[Messages]
) -> Sequence[T | None]:
    """Return one value per conversation, None for each if there are none."""
    if values is None:
        return [None] * len(messages_batch)
    if len(messages_batch) != len(values):
        raise ValueError(
            f"`messages_batch` and `{name}` must have one length, got {len(messages_batch)} and "
            f"{len(values)}."
        )
    return values


def check_options(num_generations: int, thinking_ratio: float | None) -> None:
    if num_generations < 1:
        raise ValueError(f"`num_generations` must be 1 or more, got {num_generations}.")
    if thinking_ratio is not None and not 0 <= thinking_ratio <= 1:
        raise ValueError(f"`thinking_ratio` must be in [0, 1], got {thinking_ratio}.")


def _check_users(chat: ChatFormat, tasks: Sequence[RolloutTask], num_generations: int) -> None:
    if all(task.user is None for task in tasks):
        return
    if num_generations > 1:
        raise ValueError(
            f"`num_generations` must be 1 with users, got {num_generations}: each trajectory needs "
            "a user of its own. Repeat the conversation."
        )
    user_suffix_ids(chat, "Hello.")  # refuses templates that can't be used so


def _named_tools(tools_batch: Sequence[Tools | None]) -> list[dict[str, Tool]]:
    """Return each row's tools by name; rows that share a list share the work."""
    named: dict[int, dict[str, Tool]] = {}
    for tools in tools_batch:
        if id(tools) not in named:
            named[id(tools)] = tools_by_name(tools)
    return [named[id(tools)] for tools in tools_batch]


def _first(errors: BaseExceptionGroup) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
