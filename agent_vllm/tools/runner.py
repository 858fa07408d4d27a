"""ToolRunner: calls in, results out.

Owns the checks before a call, the limits on it and its repetition. Invariant: whatever a tool
does, its call ends in one `ToolResult`, in time.
"""

import asyncio
import contextlib
import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from agent_vllm.tools.loops import LoopThread
from agent_vllm.tools.results import ToolFailure, encode_result, failure
from agent_vllm.tools.threads import call_in_thread
from agent_vllm.tools.tool import Tool
from agent_vllm.types import ToolCall, ToolResult

_FIRST_RETRY_S = 0.1  # doubles with every further one


class ToolRunner:
    """Runs calls side by side: sync tools on threads, async tools on one loop of their own.

    A call that runs out of time is answered at once. Its async task is cancelled; its thread is
    interrupted, which ends a Python loop, while a thread inside C code (a sleep, a lock) ends when
    that returns. Past 64 such threads further sync calls are refused instead of piling up.

    Args:
        timeout_s: seconds for one call, None for no limit. Waiting for a place is not counted.
        max_concurrency: calls that run at one time; others wait their turn.
    """

    def __init__(self, *, timeout_s: float | None = 30.0, max_concurrency: int = 256) -> None:
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_concurrency)
        self._gates: dict[int, _Gate] = {}  # by the id of a tool's function
        self._async_loop: LoopThread | None = None

    async def run(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Tool], timeout_s: float | None = None
    ) -> list[ToolResult]:
        """Results in call order; calls begin in it too.

        Args:
            timeout_s: bounds these calls as a whole, waiting included.

        Raises:
            ToolInterrupted: a tool was interrupted by the user.
        """
        give_up_at = None if timeout_s is None else _now() + timeout_s
        if len(calls) == 1:  # no task of its own
            return [await self._run_one(calls[0], tools, give_up_at)]
        return await asyncio.gather(*(self._run_one(call, tools, give_up_at) for call in calls))

    def close(self) -> None:
        if self._async_loop is not None:
            self._async_loop.stop()
            self._async_loop = None

    async def _run_one(
        self, call: ToolCall, tools: Mapping[str, Tool], give_up_at: float | None
    ) -> ToolResult:
        problem = _problem_with(call, tools)
        if problem is not None:
            return _error_result(call, problem, "invalid")
        try:
            content = await self._try(tools[call.name], call.arguments or {}, give_up_at)
        except ToolFailure as failed:
            return _error_result(call, str(failed), "failed")
        return ToolResult(name=call.name, content=content, status="ok")

    async def _try(self, tool: Tool, arguments: Mapping[str, Any], give_up_at: float | None) -> str:
        """The call's result as text, made again as often as the tool allows and time is left."""
        for attempt in range(tool.max_retries):
            pause_s = _FIRST_RETRY_S * 2**attempt
            try:
                return await self._call(tool, arguments, give_up_at)
            except ToolFailure:
                if give_up_at is not None and _now() + pause_s >= give_up_at:
                    raise
            await asyncio.sleep(pause_s)
        return await self._call(tool, arguments, give_up_at)

    async def _call(
        self, tool: Tool, arguments: Mapping[str, Any], give_up_at: float | None
    ) -> str:
        async with contextlib.AsyncExitStack() as places:
            try:
                async with asyncio.timeout_at(give_up_at):
                    await places.enter_async_context(self._gate(tool))
                    await places.enter_async_context(self._slots)
            except TimeoutError as error:
                raise ToolFailure("Not run: no place was free in time.") from error
            limits = (self.timeout_s, None if give_up_at is None else give_up_at - _now())
            limit_s = min((limit for limit in limits if limit is not None), default=None)
            try:
                return await self._call_by_kind(tool, arguments, limit_s)
            except TimeoutError as error:
                raise ToolFailure(f"Timed out after {round(limit_s or 0.0, 2):g} s.") from error

    async def _call_by_kind(
        self, tool: Tool, arguments: Mapping[str, Any], limit_s: float | None
    ) -> str:
        if not tool.is_async:
            text = await call_in_thread(lambda: _called(tool, arguments), tool.name, limit_s)
            if isinstance(text, str):
                return text
            return await self._loop.call(_awaited(lambda: text), limit_s)
        return await self._loop.call(_awaited(lambda: _fresh_call(tool, arguments)), limit_s)

    @property
    def _loop(self) -> LoopThread:
        if self._async_loop is None or self._async_loop.is_stuck:
            self._async_loop = LoopThread()
        return self._async_loop

    def _gate(self, tool: Tool) -> "contextlib.AbstractAsyncContextManager[None]":
        if tool.max_concurrency is None and tool.max_calls_per_s is None:
            return contextlib.nullcontext()
        return self._gates.setdefault(id(tool.function), _Gate(tool))


class _Gate(contextlib.AbstractAsyncContextManager[None]):
    """One tool's own limits, held while a call of it runs."""

    def __init__(self, tool: Tool) -> None:
        self._slots = asyncio.Semaphore(tool.max_concurrency) if tool.max_concurrency else None
        self._interval_s = 1 / tool.max_calls_per_s if tool.max_calls_per_s else 0.0
        self._next_at = 0.0

    async def __aenter__(self) -> None:
        if self._slots is not None:
            await self._slots.acquire()
        now = _now()
        start_at = max(now, self._next_at)
        self._next_at = start_at + self._interval_s
        try:
            await asyncio.sleep(start_at - now)
        except BaseException:
            await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        if self._slots is not None:
            self._slots.release()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _problem_with(call: ToolCall, tools: Mapping[str, Tool]) -> str | None:
    if call.error is not None:
        return call.error
    if call.name not in tools:
        known = ", ".join(tools) or "none"
        return f"Unknown tool {call.name!r}. Available tools: {known}."
    tool = tools[call.name]
    if call.arguments is None and not tool.takes_nothing:
        return f"The call of {call.name!r} has no arguments."
    errors = tool.argument_errors(call.arguments or {})
    return f"Wrong arguments for {call.name!r}: {'; '.join(errors)}" if errors else None


def _error_result(call: ToolCall, message: str, status: Literal["failed", "invalid"]) -> ToolResult:
    return ToolResult(name=call.name, content=encode_result({"error": message}), status=status)


# ---- what runs beside the rollout: the call and the writing of its result ----


def _fresh_call(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    return tool.function(**copy.deepcopy(dict(arguments)))  # the conversation keeps its own


def _called(tool: Tool, arguments: Mapping[str, Any]) -> str | Awaitable[Any]:
    """The result as text, or what a sync function gave that must be awaited on the loop."""
    try:
        value = _fresh_call(tool, arguments)
        return value if inspect.isawaitable(value) else encode_result(value)
    except BaseException as error:  # SystemExit and its like are a tool's trouble too
        raise failure(error) from error


async def _awaited(call: Callable[[], Awaitable[Any]]) -> str:
    try:
        return encode_result(await call())
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the loop of all async tools
        raise failure(error) from error
