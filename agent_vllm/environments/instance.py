"""One instance of an environment, and the threads that its code runs on.

Owns how an instance is made and called. Invariant: what is sync runs on one thread, call after
call, as it would in a plain script; whatever it does, the wait for it ends in time.
"""

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from agent_vllm.tools import Tool, ToolFailure
from agent_vllm.tools.loops import LoopThread
from agent_vllm.tools.results import failure
from agent_vllm.tools.threads import Worker


class EnvironmentFailed(Exception):
    """An environment raised, ran out of time or gave what can't be used; says which and how."""


class Instance:
    """An environment and its threads: one for what is sync, and one with a loop for what is async.

    Attributes:
        environment: what the factory made.
        label: its class's name, for messages.
        is_usable: whether it may be reset for another trajectory. Not once it failed, or somebody
            gave up waiting for a call: nobody knows what that call still does.
    """

    def __init__(self) -> None:
        self.environment: Any = None
        self.label = ""
        self.is_usable = True
        self._worker: Worker | None = None
        self._loop: LoopThread | None = None

    @classmethod
    async def make(cls, factory: Callable[[], Any], timeout_s: float | None) -> "Instance":
        """
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

    async def attempt(self, method: str, work: Callable[[], Any], timeout_s: float | None) -> Any:
        """What a method of the environment's life returns.

        Raises:
            EnvironmentFailed: it raised, or took longer than that.
        """
        name = f"`{self.label}{'.' if method else ''}{method}`"
        try:
            async with asyncio.timeout(timeout_s):
                return await self.call(work)
        except TimeoutError as error:
            raise EnvironmentFailed(f"{name} did not return in {timeout_s:g} s.") from error
        except ToolFailure as failed:
            raise EnvironmentFailed(f"{name} failed: {failed}") from failed

    async def call(self, work: Callable[[], Any]) -> Any:
        """What `work` gives.

        Raises:
            ToolFailure: it raised.
        """
        try:
            if inspect.iscoroutinefunction(work):
                return await self._async_loop().call(_awaited(work), None)
            value = await self._sync_worker().call(lambda: _called(work))
            if inspect.isawaitable(value):
                return await self._async_loop().call(_awaited(lambda: value), None)
            return value
        except asyncio.CancelledError:
            self.is_usable = False
            raise

    def tool(self, tool: Tool) -> Tool:
        """The same tool, run on the instance's own threads."""

        async def function(**arguments: Any) -> Any:
            return await self.call(functools.partial(tool.function, **arguments))

        return dataclasses.replace(tool, function=function)

    async def user(self, messages: list[dict[str, Any]]) -> Any:
        """The environment as the simulated user of its trajectory."""
        try:
            return await self.call(functools.partial(self.environment.get_user_message, messages))
        except ToolFailure:
            self.is_usable = False
            raise

    def close(self) -> None:
        """End its threads once they are free; returns at once."""
        if self._worker is not None:
            self._worker.stop()
        if self._loop is not None and not self._loop.is_stuck:
            self._loop.stop()
        self._worker = self._loop = None

    def _sync_worker(self) -> Worker:
        if self._worker is None or self._worker.is_given_up:
            self._worker = Worker("environment")
        return self._worker

    def _async_loop(self) -> LoopThread:
        if self._loop is None or self._loop.is_stuck:
            self._loop = LoopThread()
        return self._loop


def _called(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except BaseException as error:  # SystemExit and its like are the environment's trouble too
        raise failure(error) from error


async def _awaited(work: Callable[[], Any]) -> Any:
    try:
        return await work()
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the loop
        raise failure(error) from error
