"""Run the model's tool calls under their limits.

Owns the checks before a call, its limits and its retries. Invariant: whatever a tool does, its call
ends in one `ToolResult`, in time.
"""

import asyncio
import contextlib
import copy
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal

from agent_vllm.tools.results import InvalidArguments, ToolFailure, encode_result
from agent_vllm.tools.signature import converted
from agent_vllm.tools.tool import Tool
from agent_vllm.tools.workers import (
    call_in_main,
    call_in_one_thread,
    call_in_thread,
    shared_loop,
)
from agent_vllm.types import ToolCall, ToolResult

_FIRST_RETRY_S = 0.1  # doubles with every further one
_CALL_IN = {"thread": call_in_thread, "one_thread": call_in_one_thread, "main": call_in_main}
_NEEDS_A_THREAD = (
    "signal only works in main thread",
    "SQLite objects created in a thread can only be used in that same thread",
    "annot switch to a different thread",  # greenlets, as Playwright uses them
    "There is no current event loop in thread",
)


class ToolRunner:
    """Run calls concurrently: sync tools where they say (`Tool.runs_in`), async tools on one loop.

    A call that times out is answered at once. Its async task is cancelled. Its thread is
    interrupted: a Python loop ends, and a thread inside C code (a sleep, a lock) ends when that
    returns. At most 64 such threads may be outstanding; then further sync calls are refused.

    Args:
        timeout_s: seconds per call, None for no limit. Waiting for a slot is not counted.
        max_concurrency: calls that run at one time; others wait.
    """

    def __init__(self, *, timeout_s: float | None = 30.0, max_concurrency: int = 256) -> None:
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_concurrency)
        self._gates: dict[int, _Gate] = {}  # by the id of a tool's function
        self._threads = {"main": asyncio.Semaphore(1), "one_thread": asyncio.Semaphore(1)}

    async def run(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Tool], timeout_s: float | None = None
    ) -> list[ToolResult]:
        """Run the calls; they start in order, and results come back in call order.

        Args:
            calls: of one turn.
            tools: the tools on offer, by name.
            timeout_s: limit for these calls together, waiting included.

        Raises:
            ToolInterrupted: a tool was interrupted by the user.
        """
        give_up_at = None if timeout_s is None else _now() + timeout_s
        if len(calls) == 1:  # no task of its own
            return [await self._run_one(calls[0], tools, give_up_at)]
        return await asyncio.gather(*(self._run_one(call, tools, give_up_at) for call in calls))

    async def _run_one(
        self, call: ToolCall, tools: Mapping[str, Tool], give_up_at: float | None
    ) -> ToolResult:
        problem = _problem_with(call, tools)
        if problem is not None:
            return _error_result(call, problem, "invalid")
        try:
            content = await self._try(tools[call.name], call.arguments or {}, give_up_at)
        except InvalidArguments as problem:
            return _error_result(call, f"Wrong arguments for {call.name!r}: {problem}", "invalid")
        except ToolFailure as failed:
            return _error_result(call, str(failed), "failed")
        return ToolResult(name=call.name, content=content, status="ok")

    async def _try(self, tool: Tool, arguments: Mapping[str, Any], give_up_at: float | None) -> str:
        """Return the call's result as text; retry as the tool allows and while time is left."""
        for attempt in range(tool.max_retries):
            pause_s = _FIRST_RETRY_S * 2**attempt
            try:
                return await self._call(tool, arguments, give_up_at)
            except InvalidArguments:
                raise
            except ToolFailure:
                if give_up_at is not None and _now() + pause_s >= give_up_at:
                    raise
            await asyncio.sleep(pause_s)
        return await self._call(tool, arguments, give_up_at)

    async def _call(
        self, tool: Tool, arguments: Mapping[str, Any], give_up_at: float | None
    ) -> str:
        async with contextlib.AsyncExitStack() as slots:
            try:
                async with asyncio.timeout_at(give_up_at):
                    await slots.enter_async_context(self._gate(tool))
                    if tool.runs_in in self._threads:
                        await slots.enter_async_context(self._threads[tool.runs_in])
                    await slots.enter_async_context(self._slots)
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
            work = lambda: _called(tool, arguments)  # noqa: E731
            try:
                text = await _CALL_IN[tool.runs_in](work, tool.name, limit_s)
            except ToolFailure as failed:
                raise (_with_hint(failed, tool) or failed) from None
            if isinstance(text, str):
                return text
            return await shared_loop().call(lambda: _awaited(text), tool.name, limit_s)
        return await shared_loop().call(
            lambda: _awaited(_fresh_call(tool, arguments)), tool.name, limit_s
        )

    def _gate(self, tool: Tool) -> "contextlib.AbstractAsyncContextManager[None]":
        if tool.max_concurrency is None and tool.max_calls_per_s is None:
            return contextlib.nullcontext()
        return self._gates.setdefault(id(tool.function), _Gate(tool))


class _Gate(contextlib.AbstractAsyncContextManager[None]):
    """Hold one tool's own limits while a call of it runs."""

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


def _with_hint(failed: ToolFailure, tool: Tool) -> ToolFailure | None:
    """Name the setting that helps where the thread was the trouble."""
    if tool.runs_in == "main" or not any(said in str(failed) for said in _NEEDS_A_THREAD):
        return None
    return ToolFailure(
        f"{failed}. Give `Tool(function={tool.name}, runs_in='main')` for signals and for what the "
        "main thread opened, or runs_in='one_thread' for what the tools themselves open."
    )


# ---- what runs on a worker: the call and the encoding of its result ----


def _fresh_call(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    values = copy.deepcopy(dict(arguments))  # the conversation keeps its own
    try:
        values = converted(values, tool.converters)
    except ValueError as error:
        raise InvalidArguments(str(error)) from error
    return tool.function(**values)


def _called(tool: Tool, arguments: Mapping[str, Any]) -> str | Awaitable[Any]:
    """Return the result as text, or the awaitable that a sync function returned."""
    value = _fresh_call(tool, arguments)
    return value if inspect.isawaitable(value) else encode_result(value)


async def _awaited(value: Awaitable[Any]) -> str:
    return encode_result(await value)
