"""Keep environments: stateful worlds with their own tools, made by TRL's `environment_factory`.

Owns the instances, one per trajectory: makes, resets, scores and reuses them. Knows nothing of
datasets and trainers. Invariant: whatever an instance does affects its own trajectory only (but an
async method that blocks the shared event loop delays the others), and an instance that failed or
hangs is never used again.
"""

import asyncio
import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_vllm.blocking import run_blocking
from agent_vllm.environments.instance import EnvironmentFailed, Instance
from agent_vllm.environments.kinds import Factory, checked_factories, kind_of
from agent_vllm.environments.user import User
from agent_vllm.errors import EnvironmentDefinitionError
from agent_vllm.tools import Tool, ToolInterrupted
from agent_vllm.types import StopReason, Trajectory

_NO_PROMPT = [{"role": "user", "content": ""}]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedEnvironment:
    """Hold one trajectory's environment after its `reset`; each field is an argument of a rollout.

    Attributes:
        messages: the row's prompt, with the text of `reset` at the end of its last message.
        tools: the instance's public methods, and the tools from its `get_tools`.
        user: the simulated user, if the environment has `get_user_message`.
        error: why there is no environment; then the trajectory has failed before it began.
        environment: the instance itself, None if there is none.
    """

    messages: list[dict[str, Any]]
    tools: list[Tool] = dataclasses.field(default_factory=list)
    user: User | None = None
    error: str | None = None
    environment: Any = None


class Environments:
    """Keep instances of one or several kinds of environment.

    A kind is a class with `reset(**row)`, which returns None or text for the prompt. Its public
    methods with type hints and docstrings are tools. It may have `get_tools()` (further tools,
    asked for after `reset`), `get_reward()` and `get_user_message(messages)`. All of them may be
    async. Sync methods of an instance, its constructor included, run one after another on a thread
    of its own.

        with Environments(Wordle) as environments:
            started = environments.start(rows)
            trajectories = rollout_batch(
                engine,
                chat,
                [s.messages for s in started],
                [s.tools for s in started],
                users_batch=[s.user for s in started],
                failed_batch=[s.error for s in started],
            )
            trajectories, rewards = environments.score(trajectories)

    Args:
        factories: a class or function that makes an instance, or several by the name that a row's
            `environment` gives.
        is_fresh: make a new instance for every trajectory; by default they are reset and reused.
        timeout_s: seconds for making an instance, for a `reset` and for a `get_reward`; None for no
            limit.

    Attributes:
        examples: one instance of each kind, by name; None is the name of a single factory.
        is_routed: whether rows say which kind they want.
        num_failed: trajectories whose environment failed, so far.

    Raises:
        EnvironmentDefinitionError: a factory can't be called or fails, or its instance can't be
            used; says what is missing.
    """

    def __init__(
        self,
        factories: Factory | Mapping[str, Factory],
        *,
        is_fresh: bool = False,
        timeout_s: float | None = 120.0,
    ) -> None:
        self.is_routed = isinstance(factories, Mapping)
        self.num_failed = 0
        self._factories = checked_factories(factories)
        self._is_fresh = is_fresh
        self._timeout_s = timeout_s
        self._in_use: list[tuple[str | None, Instance | None]] = []  # by trajectory
        made = _blocking(_first_instances(self._factories, timeout_s))
        self._idle: dict[str | None, list[Instance]] = {name: [i] for name, i in made.items()}
        self.examples = {name: instance.environment for name, instance in made.items()}

    def __enter__(self) -> "Environments":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads of all instances."""
        self._release()
        for instance in (i for idle in self._idle.values() for i in idle):
            instance.close()
        self._idle = {name: [] for name in self._factories}

    @property
    def reward_types(self) -> list[type]:
        """Return the classes that score their trajectories, in the order of their factories."""
        return list(dict.fromkeys(type(e) for e in self.examples.values() if kind_of(e).has_reward))

    @property
    def have_users(self) -> bool:
        """Return whether some kind has a simulated user."""
        return any(kind_of(example).has_user for example in self.examples.values())

    def tool_names(self, name: str | None) -> list[str]:
        """Return the methods that the model may call in this kind of environment."""
        return list(kind_of(self.examples[name]).tools)

    @property
    def example_tools(self) -> list[Tool]:
        """Return the methods that the model may call, of every kind, bound to no instance."""
        return [
            tool for example in self.examples.values() for tool in kind_of(example).tools.values()
        ]

    def start(
        self, rows: Sequence[Mapping[str, Any]], as_data: Callable[[str], str] = str
    ) -> list[StartedEnvironment]:
        """Reset one instance per row, concurrently; those of the previous start are released.

        A row's columns are the arguments of `reset`, without `environment` if there are several
        kinds. Each instance gets a copy.

        Args:
            rows: one per trajectory; `prompt` is its conversation.
            as_data: applied to the text of each `reset` before it goes into the prompt;
                `ChatFormat.as_data` keeps control tokens text.

        Raises:
            EnvironmentDefinitionError: a row names an environment that there is no factory for.
        """
        self._release()
        names = [row.get("environment") if self.is_routed else None for row in rows]
        for name in names:
            self.check_name(name)
        at_hand = [self._idle[name].pop(0) if self._idle[name] else None for name in names]
        self._in_use = list(zip(names, at_hand, strict=True))
        starts = (self._start(place, row, as_data) for place, row in enumerate(rows))
        started = _blocking(_all(starts))
        self._report([s.error for s in started])
        return started

    def score(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Trajectory], list[float | None]]:
        """Ask the environments of the last start for their rewards, concurrently.

        Returns:
            The trajectories, those whose `get_reward` failed as `StopReason.ENVIRONMENT_ERROR`; and
            their rewards, None if the environment gave none and for trajectories that failed.
        """
        pairs = zip(self._in_use, trajectories, strict=True)
        scores = _blocking(_all(_score(i, t, self._timeout_s) for (_, i), t in pairs))
        self._report([e for e in scores if isinstance(e, EnvironmentFailed)])
        scored = [_scored(t, score) for t, score in zip(trajectories, scores, strict=True)]
        return scored, [None if isinstance(s, EnvironmentFailed) else s for s in scores]

    def check_name(self, name: Any) -> None:
        """Check that there is a factory of this name.

        Raises:
            EnvironmentDefinitionError: there is none.
        """
        if name not in self._factories:
            raise EnvironmentDefinitionError(
                f"A row's `environment` must be one of {list(self._factories)}, got {name!r}. "
                "Correct the column, or give `environment_factory` a factory of that name."
            )

    async def _start(
        self, place: int, row: Mapping[str, Any], as_data: Callable[[str], str]
    ) -> StartedEnvironment:
        name, instance = self._in_use[place]
        messages = [dict(message) for message in row.get("prompt") or _NO_PROMPT]
        try:
            if instance is None:
                instance = await Instance.make(self._factories[name], self._timeout_s)
                self._in_use[place] = (name, instance)
            columns = {k: v for k, v in row.items() if not (self.is_routed and k == "environment")}
            said, tools = await instance.reset(copy.deepcopy(columns), self._timeout_s)
        except EnvironmentFailed as failed:
            if instance is not None:
                instance.is_usable = False
            return StartedEnvironment(messages=messages, error=str(failed))
        return StartedEnvironment(
            messages=messages if said is None else _with_text(messages, as_data(said)),
            tools=tools,
            user=instance.user if instance.kind.has_user else None,
            environment=instance.environment,
        )

    def _release(self) -> None:
        """Make the instances of the last start idle again, those that may be reused."""
        given_back: dict[str | None, list[Instance]] = {name: [] for name in self._factories}
        for name, instance in self._in_use:
            if instance is None:
                continue
            if instance.is_usable and not self._is_fresh:
                given_back[name].append(instance)
            else:
                instance.close()
        self._in_use = []
        self._idle = {name: given_back[name] + idle for name, idle in self._idle.items()}

    def _report(self, errors: Sequence[Any]) -> None:
        failures = [str(error) for error in errors if error is not None]
        if failures:
            self.num_failed += len(failures)
            _log.warning(
                "%d environments failed, %d so far; their trajectories are left out. The first: %s",
                len(failures),
                self.num_failed,
                failures[0],
            )


async def _all(work: Any) -> list[Any]:
    return await asyncio.gather(*work)


async def _first_instances(
    factories: Mapping[str | None, Factory], timeout_s: float | None
) -> dict[str | None, Instance]:
    made = {}
    try:
        for name, factory in factories.items():
            made[name] = await Instance.make(factory, timeout_s)
            kind_of(made[name].environment)
    except EnvironmentFailed as failed:
        raise EnvironmentDefinitionError(
            f"`environment_factory` must make an environment: {failed}"
        ) from failed
    return made


async def _score(
    instance: Instance | None, trajectory: Trajectory, timeout_s: float | None
) -> float | EnvironmentFailed | None:
    if instance is None or trajectory.stop_reason.is_failure or not instance.kind.has_reward:
        return None
    try:
        return await instance.reward(timeout_s)
    except EnvironmentFailed as failed:
        instance.is_usable = False
        return failed


def _with_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    *before, last = messages
    content: Any = last.get("content") or ""
    added: Any = [{"type": "text", "text": text}] if isinstance(content, list) else text
    return [*before, {**last, "content": content + added}]


def _scored(trajectory: Trajectory, score: float | EnvironmentFailed | None) -> Trajectory:
    if not isinstance(score, EnvironmentFailed):
        return trajectory
    return dataclasses.replace(
        trajectory, stop_reason=StopReason.ENVIRONMENT_ERROR, error=str(score)
    )


def _blocking(work: Any) -> Any:
    try:
        return run_blocking(work)
    except ToolInterrupted:
        raise KeyboardInterrupt from None
