"""Run one agent, a function or a command, until it returns, fails or is out of time.

Invariant: whatever the agent does, its run ends in time, and nothing that it started in its process
group goes on.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from agent_vllm.errors import EngineUnavailableError
from agent_vllm.tools import MAX_RESULT_CHARS, ToolFailure, call_in_thread, shared_loop

# What a command is started through: the kernel kills it if this process is killed.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)

Row = Mapping[str, Any]
Agent = Callable[[Row, Any], Any] | Sequence[str]
"""An async or sync function that takes a row and an OpenAI client that is set up (an `AsyncOpenAI`
for an async function), or a command. A command finds `OPENAI_BASE_URL`, `OPENAI_API_KEY` and
`OPENAI_MODEL` among its environment variables, and the row as JSON on its input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Hold what an agent needs to reach its trajectory."""

    base_url: str
    api_key: str
    model: str


class AgentFailed(Exception):
    """The agent raised, or its process ended with another code than 0."""


async def run_agent(agent: Agent, row: Row, endpoint: Endpoint, timeout_s: float | None) -> Any:
    """Return what the agent returned, or what its process printed.

    Raises:
        AgentFailed: says how.
        TimeoutError: it took longer, and was stopped.
        ToolInterrupted: it raised KeyboardInterrupt.
    """
    if not callable(agent):
        return await asyncio.wait_for(_run_command(agent, row, endpoint), timeout_s)
    try:
        if is_async(agent):
            call = functools.partial(_call_async, agent, dict(row), endpoint)
            return await shared_loop().call(call, "agent", timeout_s)
        call = functools.partial(_call, agent, dict(row), endpoint)
        return await call_in_thread(call, "agent", timeout_s)
    except ToolFailure as failed:
        raise AgentFailed(str(failed)) from failed


def check_agent(agent: Agent) -> None:
    """Refuse what is no agent.

    Raises:
        TypeError: it is neither a function nor a command.
        EngineUnavailableError: it needs an OpenAI client, and `openai` is not installed.
    """
    if callable(agent):
        _openai()
        return
    is_command = isinstance(agent, Sequence) and not isinstance(agent, str)
    if not is_command or not agent or not all(isinstance(word, str) for word in agent):
        raise TypeError(
            "`agent` must be a function of a row and a client, or a command as a list of words, "
            f"got {agent!r}."
        )


def is_async(agent: Callable[..., Any]) -> bool:
    """Return whether calling the agent gives a coroutine."""
    call = getattr(agent, "__call__", None)  # noqa: B004 - an object's async __call__
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(call)


# ---- functions ----


async def _call_async(agent: Callable[..., Awaitable[Any]], row: Row, endpoint: Endpoint) -> Any:
    openai = _openai()
    http_client = openai.DefaultAsyncHttpxClient(verify=_no_certificates())
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=http_client
    ) as client:
        return await agent(row, client)


def _call(agent: Callable[..., Any], row: Row, endpoint: Endpoint) -> Any:
    openai = _openai()
    http_client = openai.DefaultHttpxClient(verify=_no_certificates())
    with openai.OpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=http_client
    ) as client:
        return agent(row, client)


@functools.cache
def _no_certificates() -> ssl.SSLContext:
    """Trust nobody: the endpoint is plain HTTP, and reading certificates takes 20 ms per client."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise EngineUnavailableError(
            "An agent function gets a client of the package `openai`, which is not installed. "
            "Install agent-vllm[agent]."
        ) from error
    return openai


# ---- commands ----


async def _run_command(command: Sequence[str], row: Row, endpoint: Endpoint) -> str:
    environment = {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
    }
    if shutil.which(command[0]) is None:
        raise AgentFailed(f"{command[0]} can't be started: there is no such program.")
    # Files, since what the process leaves behind would keep pipes open.
    with contextlib.ExitStack() as files:
        given, printed, complaint = (
            files.enter_context(tempfile.TemporaryFile()) for _ in range(3)
        )
        given.write(json.dumps(dict(row), default=str).encode())
        given.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-ISc",
                _TIED,
                *command,
                stdin=given,
                stdout=printed,
                stderr=complaint,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailed(f"{command[0]} can't be started: {error}") from error
        try:
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code != 0:
            last = (_end_of(complaint).splitlines() or ["It wrote no error."])[-1]
            raise AgentFailed(f"{command[0]} ended with code {code}. {last}")
        return _end_of(printed)


def _end_of(file: IO[bytes]) -> str:
    """Return the last of what a process wrote."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - MAX_RESULT_CHARS, 0))
    return file.read().decode("utf-8", "replace").strip()
