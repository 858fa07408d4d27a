"""Environments: stateful worlds with tools of their own, as TRL's `environment_factory` makes them.

Owns their instances, one for each trajectory: made, reset, called, scored, thrown away. Knows
nothing of datasets and trainers. Invariant: whatever an instance does, only its own trajectory
sees it; an instance that failed or was given up on is never used again.
"""

import asyncio
import copy
import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_vllm.blocking import run_blocking
from agent_vllm.environments.instance import EnvironmentFailed, Instance
from agent_vllm.environments.user import User
from agent_vllm.errors import EnvironmentDefinitionError, ToolDefinitionError
from agent_vllm.tools import Tool, ToolInterrupted, as_tool, tools_by_name
from agent_vllm.types import StopReason, Trajectory

Factory = Callable[[], Any]

LIFECYCLE = ("reset", "get_tools", "get_reward", "get_user_message")
"""Public methods that are not the model's to call."""

_NO_PROMPT = [{"role": "user", "content": ""}]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedEnvironment:
    """One trajectory's environment after its `reset`; each field is an argument of a rollout.

    Attributes:
        messages: the row's prompt, with what `reset` said at the end of its last message.
        tools: the instance's public methods, and what its `get_tools` gave.
        user: who answers the model, where the environment has `get_user_message`.
        error: why there is no environment; then the trajectory has failed before it began.
        environment: the instance itself, None where there is none.
    """

    messages: list[dict[str, Any]]
    tools: list[Tool] = dataclasses.field(default_factory=list)
    user: User | None = None
    error: str | None = None
    environment: Any = None


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What a class of environments offers."""

    schemas: dict[str, Mapping[str, Any]]  # by method
    has_tools: bool
    has_reward: bool
    has_user: bool


class Environments:
    """Instances of one or several kinds of environment.

    A kind is a class with `reset(**row)`, which returns None or text for the prompt; public methods
    with type hints and docstrings, which the model may call; and perhaps `get_tools()` (further
    tools, once it was reset), `get_reward()` and `get_user_message(messages)`. All of them may be
    async. What is sync in one instance, its making included, runs on one thread of its own, call
    after call.

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
        is_fresh: make a new instance for every trajectory; by default they are reset and used
            again.
        timeout_s: seconds for making an instance, for a `reset` and for a `get_reward`; None for no
            limit.

    Attributes:
        examples: one instance of each kind, by name; None is the name of a single factory.
        is_routed: whether rows say which kind they want.
        num_failed: trajectories whose environment failed, so far.

    Raises:
        EnvironmentDefinitionError: a factory that is none or fails, or an instance that can't be
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
        self._factories: dict[str | None, Factory] = _checked_factories(factories)
        self._is_fresh = is_fresh
        self._timeout_s = timeout_s
        self._kinds: dict[type, _Kind] = {}
        self._in_use: list[tuple[str | None, Instance | None]] = []  # by trajectory
        made = _blocking(self._first_instances())
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
        """The classes that score their trajectories, in the order of their factories."""
        examples = [e for e in self.examples.values() if self._kind(e).has_reward]
        return list(dict.fromkeys(map(type, examples)))

    @property
    def have_users(self) -> bool:
        """Whether some kind has a simulated user."""
        return any(self._kind(example).has_user for example in self.examples.values())

    def tool_names(self, name: str | None) -> list[str]:
        """The methods that the model may call in this kind of environment."""
        return list(self._kind(self.examples[name]).schemas)

    def start(
        self, rows: Sequence[Mapping[str, Any]], as_data: Callable[[str], str] = str
    ) -> list[StartedEnvironment]:
        """An instance for each row, all reset side by side. Those of the last start are given back.

        A row's columns are the arguments of `reset`; several kinds don't get `environment`. Each
        gets a copy.

        Args:
            as_data: what `reset` says goes through it on its way into the prompt;
                `ChatFormat.as_data` keeps control tokens text.

        Raises:
            EnvironmentDefinitionError: a row names an environment that there is no factory for.
        """
        self._release()
        names = [row.get("environment") if self.is_routed else None for row in rows]
        for name in names:
            self.check_name(name)
        started = _blocking(self._start_all(names, rows, as_data))
        self._report([s.error for s in started])
        return started

    def score(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Trajectory], list[float | None]]:
        """What the environments of the last start say of their trajectories, all side by side.

        Returns:
            The trajectories, those whose `get_reward` failed as `StopReason.ENVIRONMENT_ERROR`; and
            their rewards, None where nothing was said and for trajectories that failed.
        """
        scores = _blocking(self._score_all(trajectories))
        self._report([e for e in scores if isinstance(e, EnvironmentFailed)])
        scored = [_scored(t, score) for t, score in zip(trajectories, scores, strict=True)]
        return scored, [None if isinstance(s, EnvironmentFailed) else s for s in scores]

    def check_name(self, name: Any) -> None:
        """Raises: EnvironmentDefinitionError: there is no factory of this name."""
        if name not in self._factories:
            raise EnvironmentDefinitionError(
                f"A row's `environment` must be one of {list(self._factories)}, got {name!r}. "
                "Correct the column, or give `environment_factory` a factory of that name."
            )

    # ---- parts ----

    async def _first_instances(self) -> dict[str | None, Instance]:
        made = {}
        try:
            for name, factory in self._factories.items():
                made[name] = await Instance.make(factory, self._timeout_s)
                self._kind(made[name].environment)
        except EnvironmentFailed as failed:
            raise EnvironmentDefinitionError(
                f"`environment_factory` must make an environment: {failed}"
            ) from failed
        return made

    async def _start_all(
        self,
        names: Sequence[str | None],
        rows: Sequence[Mapping[str, Any]],
        as_data: Callable[[str], str],
    ) -> list[StartedEnvironment]:
        at_hand = [self._idle[name].pop(0) if self._idle[name] else None for name in names]
        self._in_use = list(zip(names, at_hand, strict=True))
        places = enumerate(rows)
        return await asyncio.gather(*(self._start(place, row, as_data) for place, row in places))

    async def _start(
        self, place: int, row: Mapping[str, Any], as_data: Callable[[str], str]
    ) -> StartedEnvironment:
        name, instance = self._in_use[place]
        messages = [dict(message) for message in row.get("prompt") or _NO_PROMPT]
        try:
            if instance is None:
                instance = await Instance.make(self._factories[name], self._timeout_s)
                self._in_use[place] = (name, instance)
            kind = self._usable_kind(instance)
            columns = {k: v for k, v in row.items() if not (self.is_routed and k == "environment")}
            reset = functools.partial(instance.environment.reset, **copy.deepcopy(columns))
            said = _text(instance, await instance.attempt("reset", reset, self._timeout_s))
            tools = await self._tools(instance, kind)
        except EnvironmentFailed as failed:
            if instance is not None:
                instance.is_usable = False
            return StartedEnvironment(messages=messages, error=str(failed))
        return StartedEnvironment(
            messages=messages if said is None else _with_text(messages, as_data(said)),
            tools=tools,
            user=instance.user if kind.has_user else None,
            environment=instance.environment,
        )

    async def _tools(self, instance: Instance, kind: _Kind) -> list[Tool]:
        environment, given = instance.environment, []
        if kind.has_tools:
            given = await instance.attempt("get_tools", environment.get_tools, self._timeout_s)
            if not isinstance(given, list | tuple):
                raise EnvironmentFailed(
                    f"`{instance.label}.get_tools` must return a list of tools, got "
                    f"{type(given).__name__}."
                )
        methods = [
            Tool(schema=schema, function=getattr(environment, name))
            for name, schema in kind.schemas.items()
        ]
        try:
            return [instance.tool(tool) for tool in tools_by_name([*methods, *given]).values()]
        except ToolDefinitionError as error:
            raise EnvironmentFailed(f"The tools of `{instance.label}`: {error}") from error

    async def _score_all(
        self, trajectories: Sequence[Trajectory]
    ) -> list[float | EnvironmentFailed | None]:
        pairs = zip(self._in_use, trajectories, strict=True)
        return await asyncio.gather(*(self._score(i, t) for (_, i), t in pairs))

    async def _score(
        self, instance: Instance | None, trajectory: Trajectory
    ) -> float | EnvironmentFailed | None:
        if instance is None or trajectory.stop_reason.is_failure:
            return None
        if not self._kind(instance.environment).has_reward:
            return None
        try:
            get_reward = instance.environment.get_reward
            reward = await instance.attempt("get_reward", get_reward, self._timeout_s)
            return _number(instance, reward)
        except EnvironmentFailed as failed:
            instance.is_usable = False
            return failed

    def _kind(self, environment: Any) -> _Kind:
        kind = self._kinds.get(type(environment))
        if kind is None:
            kind = self._kinds[type(environment)] = _described(environment)
        return kind

    def _usable_kind(self, instance: Instance) -> _Kind:
        try:
            return self._kind(instance.environment)
        except EnvironmentDefinitionError as error:
            raise EnvironmentFailed(str(error)) from error

    def _release(self) -> None:
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
        told = [str(error) for error in errors if error is not None]
        if told:
            self.num_failed += len(told)
            _log.warning(
                "%d environments failed, %d so far; their trajectories are left out. The first: %s",
                len(told),
                self.num_failed,
                told[0],
            )


def _described(environment: Any) -> _Kind:
    """Methods are looked for where TRL looks for them: among the functions of the class."""
    name = type(environment).__name__
    methods = [method for method, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    if "reset" not in methods:
        raise EnvironmentDefinitionError(
            f"Environment `{name}` must have a method `reset(self, **row)`. It is called before "
            "each trajectory; what it returns, None or text, is added to the prompt."
        )
    tools = [m for m in methods if m not in LIFECYCLE and not m.startswith("_")]
    return _Kind(
        schemas={tool: _schema(name, getattr(environment, tool)) for tool in tools},
        has_tools="get_tools" in methods,
        has_reward="get_reward" in methods,
        has_user="get_user_message" in methods,
    )


def _schema(name: str, method: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return as_tool(method).schema
    except ToolDefinitionError as error:
        raise EnvironmentDefinitionError(
            f"Environment `{name}` offers its public methods to the model. {error} If one is not "
            "for the model, begin its name with an underscore."
        ) from error


def _checked_factories(factories: Any) -> dict[str | None, Factory]:
    named: dict[str | None, Factory]
    named = dict(factories) if isinstance(factories, Mapping) else {None: factories}
    if not named:
        raise EnvironmentDefinitionError(
            "`environment_factory` must hold at least one factory, got an empty dict."
        )
    for name, factory in named.items():
        if not callable(factory):
            where = "" if name is None else f"[{name!r}]"
            raise EnvironmentDefinitionError(
                f"`environment_factory{where}` must be a class or function that makes an "
                f"environment, got {factory!r}. Give the class itself, not an instance."
            )
    return named


def _text(instance: Instance, said: Any) -> str | None:
    if said is None or isinstance(said, str):
        return said
    if isinstance(said, list) and all(isinstance(b, dict) and "text" in b for b in said):
        return "".join(block["text"] for block in said)
    raise EnvironmentFailed(
        f"`{instance.label}.reset` must return a string or None, got {type(said).__name__}. "
        "Rollouts are text only."
    )


def _with_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    *before, last = messages
    is_blocks = isinstance(last["content"], list)
    added = [{"type": "text", "text": text}] if is_blocks else text
    return [*before, {**last, "content": last["content"] + added}]


def _number(instance: Instance, reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        value = float(reward) if hasattr(type(reward), "__float__") else math.nan
    except Exception:  # a tensor of several numbers, and whatever else calls itself one
        value = math.nan
    if not math.isfinite(value):
        raise EnvironmentFailed(
            f"`{instance.label}.get_reward` must return a finite number or None, got {reward!r} "
            f"({type(reward).__name__})."
        )
    return value


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
