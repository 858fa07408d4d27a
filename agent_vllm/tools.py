"""Tools: what the model may call, and the running of its calls.

Owns schemas, argument checks, time limits and the text form of results. Knows nothing of chats,
tokens or engines. Invariant: whatever a tool does, its call ends in one `ToolResult`, in time.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import inspect
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

import jsonschema
from transformers.utils.chat_template_utils import get_json_schema

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.types import ToolCall, ToolResult

_MAX_HANGING_CALLS = 64
_LOOP_PING_S = 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool:
    """A function that the model may call.

    Attributes:
        schema: what the chat template sees, `{"type": "function", "function": {"name",
            "description", "parameters"}}`, as `transformers.utils.get_json_schema` gives it.
        function: sync or async; gets the arguments by keyword.
        ends_episode: a call that succeeds is the trajectory's last act (a "final answer" tool).
    """

    schema: Mapping[str, Any]
    function: Callable[..., Any]
    ends_episode: bool = False

    def __post_init__(self) -> None:
        try:
            jsonschema.Draft202012Validator.check_schema(self._parameters)
        except jsonschema.SchemaError as error:
            raise ToolDefinitionError(
                f"The parameters of tool `{self.name}` are no JSON schema: {error.message}."
            ) from error

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @functools.cached_property
    def is_async(self) -> bool:
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an object's async __call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @functools.cached_property
    def _validator(self) -> jsonschema.Draft202012Validator:
        return jsonschema.Draft202012Validator(self._parameters)

    @functools.cached_property
    def _parameters(self) -> dict[str, Any]:
        parameters = self.schema["function"].get("parameters") or {}
        return {"type": "object", "additionalProperties": False, **parameters}

    def argument_errors(self, arguments: Mapping[str, Any]) -> list[str]:
        """What is wrong with the arguments, in the schema's terms; empty when they fit."""
        return [
            f"{'.'.join(map(str, error.absolute_path)) or 'arguments'}: {error.message}"
            for error in self._validator.iter_errors(arguments)
        ]

    @property
    def takes_nothing(self) -> bool:
        return not self._parameters.get("properties")


def as_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """A `Tool` from a Python function with type hints and a Google-style docstring.

    Raises:
        ToolDefinitionError: the function can't be described to the model; says what is missing.
    """
    if isinstance(tool, Tool):
        return tool
    if not callable(tool):
        raise ToolDefinitionError(
            f"A tool must be a function or an `agent_vllm.tools.Tool`, got {tool!r}."
        )
    try:
        return Tool(schema=get_json_schema(tool), function=tool)
    except Exception as error:  # the parser of hints and docstrings raises many kinds
        name = getattr(tool, "__name__", repr(tool))
        raise ToolDefinitionError(
            f"Tool `{name}` can't be described to the model: {error} Give every argument a type "
            "hint, and the function a Google-style docstring with a line for each argument."
        ) from error


def tools_by_name(tools: Iterable[Tool | Callable[..., Any]] | None) -> dict[str, Tool]:
    """Tools in order, by the name the model uses.

    Raises:
        ToolDefinitionError: a tool that can't be described, or two of one name.
    """
    named: dict[str, Tool] = {}
    for tool in map(as_tool, tools or ()):
        if tool.name in named:
            raise ToolDefinitionError(
                f"Two tools are named `{tool.name}`. The model calls tools by name: rename one."
            )
        named[tool.name] = tool
    return named


def tool_name(tool: Tool | Callable[..., Any]) -> str:
    """The name that the model uses, without the work of describing the tool."""
    return tool.name if isinstance(tool, Tool) else tool.__name__


class ToolRunner:
    """Runs calls side by side: sync tools on a thread each, async tools on one loop of their own.

    A call that runs out of time is answered at once. Its async task is cancelled; its thread is
    interrupted, which ends a Python loop, while a thread inside C code (a sleep, a socket) ends
    when that returns. Past 64 such threads further sync calls are refused instead of piling up.

    Args:
        timeout_s: seconds for one call, None for no limit.
        max_concurrency: calls that run at one time; others wait their turn (the wait is not timed).
    """

    def __init__(self, *, timeout_s: float | None = 30.0, max_concurrency: int = 256) -> None:
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_concurrency)
        self._async_loop: _LoopThread | None = None

    async def run(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Tool], timeout_s: float | None = None
    ) -> list[ToolResult]:
        """Results in call order. `timeout_s` tightens the runner's own limit for these calls.

        Raises:
            ToolInterrupted: a tool was interrupted by the user.
        """
        limits = [limit for limit in (self.timeout_s, timeout_s) if limit is not None]
        limit_s = min(limits, default=None)
        return await asyncio.gather(*(self._run_one(call, tools, limit_s) for call in calls))

    def close(self) -> None:
        if self._async_loop is not None:
            self._async_loop.stop()
            self._async_loop = None

    async def _run_one(
        self, call: ToolCall, tools: Mapping[str, Tool], timeout_s: float | None
    ) -> ToolResult:
        problem = _problem_with(call, tools)
        if problem is not None:
            return _error_result(call, problem, "invalid")
        tool = tools[call.name]
        try:
            async with self._slots:
                value = await self._call(tool, call.arguments or {}, timeout_s)
            return ToolResult(name=call.name, content=encode_result(value), status="ok")
        except TimeoutError:
            return _error_result(call, f"Timed out after {timeout_s:g} s.", "failed")
        except _ToolRaised as raised:
            return _error_result(call, raised.message, "failed")

    async def _call(self, tool: Tool, arguments: Mapping[str, Any], timeout_s: float | None) -> Any:
        if not tool.is_async:
            return await _call_in_thread(tool, arguments, timeout_s)
        if self._async_loop is None or self._async_loop.is_stuck:
            self._async_loop = _LoopThread()
        return await self._async_loop.call(_outcome_of(tool, arguments), timeout_s)


def encode_result(value: Any) -> str:
    """A tool's return value as text: a string as it is, anything else as JSON.

    Sets and tuples become lists, bytes are read as UTF-8, other objects are given by `str`. Lone
    surrogates, which no tokenizer takes, become question marks.

    Raises:
        _ToolRaised: the value contains itself, is nested too deeply or has no text form.
    """
    try:
        text = (
            value
            if isinstance(value, str)
            else json.dumps(value, ensure_ascii=False, default=_plain)
        )
    except Exception as error:  # the value's own `__str__` may raise anything
        raise _ToolRaised(f"The result can't be written as JSON: {error}") from error
    return text.encode("utf-8", "replace").decode("utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    return str(value)


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


def _error_result(call: ToolCall, message: str, status: Any) -> ToolResult:
    return ToolResult(name=call.name, content=encode_result({"error": message}), status=status)


class _ToolRaised(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ToolFailure(_ToolRaised):
    """For tools to raise: the call failed with this message, word for word."""


class ToolInterrupted(BaseException):
    """A tool raised KeyboardInterrupt: the user wants the run to stop.

    The event loop would let a KeyboardInterrupt through at once and leave other trajectories
    hanging; this one lets them end first.
    """


class _Interrupted(BaseException):
    """Raised inside a thread whose call ran out of time."""


def _raise_outcome(error: BaseException) -> None:
    if isinstance(error, ToolFailure):
        raise error
    if isinstance(error, KeyboardInterrupt):
        raise ToolInterrupted from error
    raise _ToolRaised(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


def _interrupt(thread: threading.Thread) -> None:
    """Ask a thread to end: raises `_Interrupted` in it at its next step of Python code."""
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Interrupted))


# ---- sync tools ----

_hanging: set[threading.Thread] = set()


async def _call_in_thread(tool: Tool, arguments: Mapping[str, Any], timeout_s: float | None) -> Any:
    _hanging.difference_update([thread for thread in _hanging if not thread.is_alive()])
    if len(_hanging) >= _MAX_HANGING_CALLS:
        raise _ToolRaised(f"Not run: {len(_hanging)} earlier calls that timed out still hang.")
    outcome: Future[tuple[Any, BaseException | None]] = Future()
    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run,
        args=(_run_sync, tool, arguments, outcome),
        daemon=True,
        name=f"tool {tool.name}",
    )
    thread.start()
    try:
        value, error = await asyncio.wait_for(asyncio.wrap_future(outcome), timeout_s)
    except TimeoutError:
        _hanging.add(thread)
        _interrupt(thread)
        raise
    if error is not None:
        _raise_outcome(error)
    return value


def _run_sync(
    tool: Tool,
    arguments: Mapping[str, Any],
    outcome: Future[tuple[Any, BaseException | None]],
) -> None:
    try:
        result = (tool.function(**arguments), None)
    except BaseException as error:  # SystemExit and its like are a tool's trouble too
        result = (None, error)
    with contextlib.suppress(InvalidStateError):  # the caller gave up waiting
        outcome.set_result(result)


# ---- async tools ----


class _LoopThread:
    """An event loop on a thread of its own, so that a tool that never yields stalls no rollout."""

    def __init__(self) -> None:
        self.is_stuck = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="async tools")
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._loop.is_closed():
            try:
                self._loop.run_forever()
                break
            except _Interrupted:  # meant for a task that had ended by then
                continue
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def call(
        self,
        outcome: Coroutine[Any, Any, tuple[Any, BaseException | None]],
        timeout_s: float | None,
    ) -> Any:
        future = asyncio.run_coroutine_threadsafe(outcome, self._loop)
        try:
            value, error = await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            await self._free()
            raise
        if error is not None:
            _raise_outcome(error)
        return value

    async def _free(self) -> None:
        """Interrupt a task that holds the loop; give the loop up if that does not help."""
        if await self._answers():
            return
        _interrupt(self._thread)
        self.is_stuck = not await self._answers()

    async def _answers(self) -> bool:
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        give_up = time.monotonic() + _LOOP_PING_S
        while not answered.is_set() and time.monotonic() < give_up:
            await asyncio.sleep(0.01)
        return answered.is_set()


async def _outcome_of(tool: Tool, arguments: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
    task = asyncio.ensure_future(_run_async(tool, arguments))
    try:
        return await task
    except asyncio.CancelledError as error:
        if task.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
            return None, error  # the tool cancelled itself: its own trouble
        task.cancel()
        raise


async def _run_async(tool: Tool, arguments: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await tool.function(**arguments), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the loop of all async tools
        return None, error
