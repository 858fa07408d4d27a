"""Run one instance of an environment: sync methods on its own thread, async ones on a shared loop.

Invariant: sync methods run on one thread, one after another, as in a plain script. Whatever they
do, the wait for them ends in time.
"""

import asyncio
import dataclasses
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from agent_vllm.environments.kinds import Kind, kind_of
from agent_vllm.errors import EnvironmentDefinitionError, ToolDefinitionError
from agent_vllm.tools import (
    Tool,
    ToolFailure,
    Worker,
    encode_result,
    shared_loop,
    tools_by_name,
)

T = TypeVar("T")


def _as_it_is(value: Any) -> Any:
    return value


class EnvironmentFailed(ToolFailure):
    """An environment raised, timed out or returned what can't be used; says which and how."""


class Instance:
    """Hold an environment with the thread of its sync methods.

    Attributes:
        environment: what the factory made.
        label: its class's name, for messages.
        is_usable: whether it may be reset for another trajectory. False once it failed, or once a
            call was given up, as that call may still run.
    """

    def __init__(self) -> None:
        self.environment: Any = None
        self.label = ""
        self.is_usable = True
        self._worker: Worker | None = None

    @classmethod
    async def make(cls, factory: Callable[[], Any], timeout_s: float | None) -> "Instance":
        """Make an instance.

        Raises:
            EnvironmentFailed: the factory failed.
        """
        instance = cls()
        instance.label = getattr(factory, "__qualname__", type(factory).__qualname__)
        try:
            instance.environment = await instance.attempt("", factory, timeout_s)
        except BaseException:
            instance.close()
            raise
        instance.label = type(instance.environment).__name__
        return instance

    @property
    def kind(self) -> Kind:
        """Return what the environment's class offers.

        Raises:
            EnvironmentFailed: the class can't be used; says why.
        """
        try:
            return kind_of(self.environment)
        except EnvironmentDefinitionError as error:
            raise EnvironmentFailed(str(error)) from error

    async def reset(
        self, columns: Mapping[str, Any], timeout_s: float | None
    ) -> tuple[str | None, list[Tool]]:
        """Reset the environment for a row; return its text for the prompt, and its tools.

        Raises:
            EnvironmentFailed: `reset` or `get_tools` failed or returned what can't be used.
        """
        kind, environment = self.kind, self.environment
        reset = functools.partial(environment.reset, **columns)
        said = await self.attempt("reset", reset, timeout_s, self._text)
        give = environment.get_tools if kind.has_tools else list
        tools = await self.attempt("get_tools", give, timeout_s, self._tools)
        return said, tools

    async def reward(self, timeout_s: float | None) -> float | None:
        """Return what `get_reward` returns.

        Raises:
            EnvironmentFailed: it failed, or returned neither a finite number nor None.
        """
        return await self.attempt(
            "get_reward", self.environment.get_reward, timeout_s, self._reward
        )

    async def attempt(
        self,
        method: str,
        work: Callable[[], Any],
        timeout_s: float | None,
        read: Callable[[Any], T] = _as_it_is,
    ) -> T:
        """Return what `read` makes of the return value of one of the environment's own methods.

        Raises:
            EnvironmentFailed: one of them raised, or it timed out.
        """
        name = f"`{self.label}{'.' if method else ''}{method}`"
        try:
            async with asyncio.timeout(timeout_s):
                return await self.call(work, read)
        except TimeoutError as error:
            raise EnvironmentFailed(f"{name} did not return in {timeout_s:g} s.") from error
        except EnvironmentFailed:
            raise
        except ToolFailure as failed:
            raise EnvironmentFailed(f"{name} failed: {failed}") from failed

    async def call(self, work: Callable[[], Any], read: Callable[[Any], T] = _as_it_is) -> T:
        """Run `work`, then `read`: on the instance's thread, or on the shared loop if it is async.

        What `work` returns is looked at nowhere else: looking at it may raise or take for ever.

        Raises:
            ToolFailure: one of them raised.
        """
        try:
            if inspect.iscoroutinefunction(work):
                return await shared_loop().call(lambda: _awaited(work(), read), self.label, None)
            is_read, value = await self._sync_worker().call(lambda: _called(work, read))
            if not is_read:
                return await shared_loop().call(lambda: _awaited(value, read), self.label, None)
            return value
        except asyncio.CancelledError:
            self.is_usable = False
            raise

    def tool(self, tool: Tool) -> Tool:
        """Return the same tool, run as the instance's methods are."""

        async def function(**arguments: Any) -> Any:
            return await self.call(functools.partial(tool.function, **arguments), encode_result)

        return dataclasses.replace(tool, function=function)

    async def user(self, messages: list[dict[str, Any]]) -> Any:
        """Ask the environment for the next message of its simulated user."""
        try:
            return await self.call(functools.partial(self.environment.get_user_message, messages))
        except ToolFailure:
            self.is_usable = False
            raise

    def close(self) -> None:
        """End its thread once it is free; return at once."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _text(self, said: Any) -> str | None:
        if said is None or isinstance(said, str):
            return said if said is None else str.__str__(said)
        if isinstance(said, list) and all(
            isinstance(block, dict) and isinstance(block.get("text"), str) for block in said
        ):
            return "".join(block["text"] for block in said)
        raise EnvironmentFailed(
            f"`{self.label}.reset` must return a string or None, got {type(said).__name__}. "
            "Rollouts are text only."
        )

    def _reward(self, reward: Any) -> float | None:
        if reward is None:
            return None
        try:
            value = float(reward) if hasattr(type(reward), "__float__") else math.nan
        except Exception:  # a tensor of several numbers, and whatever else has the method
            value = math.nan
        if not math.isfinite(value):
            raise EnvironmentFailed(
                f"`{self.label}.get_reward` must return a finite number or None, got "
                f"{_shown(reward)} ({type(reward).__name__})."
            )
        return value

    def _tools(self, given: Any) -> list[Tool]:
        if not isinstance(given, list | tuple):
            raise EnvironmentFailed(
                f"`{self.label}.get_tools` must return a list of tools, got {type(given).__name__}."
            )
        methods = [
            dataclasses.replace(tool, function=getattr(self.environment, name))
            for name, tool in self.kind.tools.items()
        ]
        try:
            return [self.tool(tool) for tool in tools_by_name([*methods, *given]).values()]
        except ToolDefinitionError as error:
            raise EnvironmentFailed(f"The tools of `{self.label}`: {error}") from error

    def _sync_worker(self) -> Worker:
        if self._worker is None or self._worker.is_given_up:
            self._worker = Worker("environment")
        return self._worker


def _called(work: Callable[[], Any], read: Callable[[Any], Any]) -> tuple[bool, Any]:
    value = work()
    return (False, value) if inspect.isawaitable(value) else (True, read(value))


async def _awaited(value: Awaitable[Any], read: Callable[[Any], T]) -> T:
    return read(await value)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # its own `__repr__` is broken
        return "an object"
