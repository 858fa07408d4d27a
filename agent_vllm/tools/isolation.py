"""isolated: a tool whose every call runs in a process of its own, with limits.

Owns how a function is named to that process, its limits and its end. Invariant: only JSON crosses,
nothing is unpickled, and when a call ends its process group is gone.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.tools.results import ToolFailure
from agent_vllm.tools.tool import Tool, as_tool

INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")

_CALL = Path(__file__).with_name("isolated_call.py")
_POLL_S = 0.01
_DRAIN_S = 1.0  # for an answer that was written just before its process ended


def isolated(
    tool: Tool | Callable[..., Any],
    *,
    cpu_s: int = 10,
    memory_mb: int = 1024,
    max_output_bytes: int = 1_000_000,
    environment: Sequence[str] = INHERITED_VARIABLES,
) -> Tool:
    """The same tool, each call in a fresh process: it can neither end nor change this one.

    The function is found again by its module and name, so it must stand at the top level of a
    module, or of the script that is run. What that module imports is imported in every call: keep
    such tools in a module of their own that imports little. Arguments and results cross as JSON.
    The process starts in an empty folder that is deleted afterwards; what it prints is dropped; at
    its end, or when its time is up (`Limits.tool_timeout_s`), its whole process group is killed.

    The process runs as the same user: it can read this user's files and use the network. Calls of
    one tool run side by side on as many CPUs as there are, unless its `max_concurrency` says
    otherwise.

    Args:
        cpu_s: processor time of one call.
        memory_mb: address space of the process, imports included.
        max_output_bytes: of the result as JSON, and of any file that the call writes.
        environment: names of environment variables that the process may see; no others are.

    Raises:
        ToolDefinitionError: the function can't be found by name (a lambda, a closure, a method), or
            a limit is not positive; says what to do.
    """
    tool = as_tool(tool)
    for name, value in (
        ("cpu_s", cpu_s),
        ("memory_mb", memory_mb),
        ("max_output_bytes", max_output_bytes),
    ):
        if not isinstance(value, int) or value <= 0:
            raise ToolDefinitionError(
                f"`{name}` of tool `{tool.name}` must be a whole number above 0, got {value!r}."
            )
    call = _IsolatedCall(
        place=_place_of(tool),
        cpu_s=cpu_s,
        memory_mb=memory_mb,
        max_output_bytes=max_output_bytes,
        variables=tuple(environment),
    )
    max_concurrency = tool.max_concurrency or os.cpu_count()
    return dataclasses.replace(tool, function=call, max_concurrency=max_concurrency)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a function is found again: in a module, or in a script's file."""

    module: str
    qualname: str
    file: str | None


def _place_of(tool: Tool) -> _Place:
    function = tool.function
    module = getattr(function, "__module__", None) or ""
    qualname = getattr(function, "__qualname__", "<object>")
    found: Any = sys.modules.get(module)
    is_script = module == "__main__"
    file = getattr(found, "__file__", None) if is_script else None
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if found is not function or (is_script and file is None):
        raise ToolDefinitionError(
            f"Tool `{tool.name}` can't be isolated: its function {module}.{qualname} can't be "
            "found by that name from another process. Define it with `def` at the top level of a "
            "module (no lambda, closure, bound method, partial or notebook cell)."
        )
    return _Place(module=module, qualname=qualname, file=file and str(Path(file).resolve()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _IsolatedCall:
    place: _Place
    cpu_s: int
    memory_mb: int
    max_output_bytes: int
    variables: tuple[str, ...]

    async def __call__(self, **arguments: Any) -> str:
        folder = tempfile.mkdtemp(prefix="isolated-")
        try:
            answer = await self._run(folder, self._request(arguments))
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if "error" in answer:
            raise ToolFailure(answer["error"])
        return answer["text"]

    async def _run(self, folder: str, request: bytes) -> dict[str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(_CALL),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            cwd=folder,
            env={name: os.environ[name] for name in self.variables if name in os.environ},
            start_new_session=True,
            limit=self.max_output_bytes,
        )
        try:
            return await self._answer(process, request)
        finally:
            _kill_group(process)
            await _end(process)
            # Whoever escaped may hold its pipes open; nothing public closes them.
            process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]

    def _request(self, arguments: dict[str, Any]) -> bytes:
        request = {
            **dataclasses.asdict(self.place),
            "sys_path": [str(Path(entry).resolve()) for entry in sys.path],
            "arguments": arguments,
            "cpu_s": self.cpu_s,
            "memory_mb": self.memory_mb,
            "max_output_bytes": self.max_output_bytes,
        }
        return json.dumps(request).encode()

    async def _answer(self, process: Process, request: bytes) -> dict[str, str]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request)
        process.stdin.close()
        reading = asyncio.ensure_future(process.stdout.readline())
        ending = asyncio.ensure_future(_end(process))
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():  # ended, but a child may still hold the pipe
                _kill_group(process)
                await asyncio.wait([reading], timeout=_DRAIN_S)
            line = reading.result() if reading.done() else b""
            if not line:
                await asyncio.wait([ending], timeout=_DRAIN_S)
        except ValueError as error:
            raise ToolFailure(
                f"The result is longer than {self.max_output_bytes} bytes."
            ) from error
        finally:
            reading.cancel()
            ending.cancel()
        if not line.endswith(b"\n"):
            raise ToolFailure(f"Ended without a result: {self._cause(process.returncode)}.")
        return json.loads(line)

    def _cause(self, status: int | None) -> str:
        if status is None:
            return "it closed the pipe"
        if status >= 0:
            return f"exit status {status}"
        if -status == signal.SIGXCPU:
            return f"{self.cpu_s} s of processor time used up"
        return f"killed by {signal.Signals(-status).name}"


async def _end(process: Process) -> None:
    """Until it has exited; `Process.wait` waits for whoever else holds its pipes as well."""
    while process.returncode is None:
        await asyncio.sleep(_POLL_S)


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
