"""Run each call of a tool in a process of its own, with limits.

Owns how a function is named to that process, its limits, and the workers that calls are forked
from. Invariant: only JSON crosses, nothing is unpickled, and what a call started ends with it.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.tools.results import ToolFailure
from agent_vllm.tools.tool import Tool, as_tool

INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")

_WORKER = Path(__file__).with_name("isolated_worker.py")
_PIECE = 1 << 16
_END_S = 1.0  # for a worker to kill what its call started


def isolated(
    tool: Tool | Callable[..., Any],
    *,
    cpu_s: int = 10,
    memory_mb: int = 1024,
    max_output_bytes: int = 1_000_000,
    environment: Sequence[str] = INHERITED_VARIABLES,
    warm: bool = False,
) -> Tool:
    """Return the same tool with each call run in a fresh process, which shares no memory.

    The function is found again by its module and name, so it must stand at the top level of a
    module, or of the script that is run. Each call imports that module: keep such tools in a module
    of their own that imports little. Arguments and results cross as JSON. The process starts in an
    empty folder that is deleted afterwards, and what it prints is dropped. When the call ends or
    times out (`Limits.tool_timeout_s`), everything that it started is killed.

    With `warm`, workers import the module once and fork for each call, which takes about 3 ms; a
    fresh Python takes 140 ms plus the module's imports. Each call finds the module as the import
    left it. The module must stand being forked: threads that its import starts do not exist in
    calls, and what it opens is shared by all. A worker whose call timed out is replaced; all end
    with the tool.

    The process runs as the same user: it can read this user's files and use the network. As many
    calls of one tool run concurrently as there are CPUs, unless its `max_concurrency` differs.

    Args:
        tool: a function or `Tool`.
        cpu_s: processor time per call.
        memory_mb: address space of the process, imports included.
        max_output_bytes: size of the result as JSON, and of each file that the call writes.
        environment: names of the environment variables that the process may see.
        warm: keep the workers, as many as calls ran concurrently.

    Raises:
        ToolDefinitionError: the function can't be found by name (a lambda, a closure, a method), or
            a limit is not positive; says what to do.
    """
    tool = as_tool(tool)
    if tool.converters:
        raise ToolDefinitionError(
            f"The arguments of isolated tool `{tool.name}` must be JSON, got other types for "
            f"{', '.join(tool.converters)}. Give it JSON types, and convert in the function."
        )
    limits = {"cpu_s": cpu_s, "memory_mb": memory_mb, "max_output_bytes": max_output_bytes}
    for name, value in limits.items():
        if not isinstance(value, int) or value <= 0:
            raise ToolDefinitionError(
                f"`{name}` of tool `{tool.name}` must be a whole number above 0, got {value!r}."
            )
    call = _IsolatedCall({**_place_of(tool), **limits}, tuple(environment), warm)
    max_concurrency = tool.max_concurrency or os.cpu_count()
    return dataclasses.replace(tool, function=call, max_concurrency=max_concurrency)


def isolated_file(
    file: Path, qualname: str, *, cpu_s: int, memory_mb: int, max_output_bytes: int
) -> Callable[..., Awaitable[str]]:
    """Return a function of a file that needs no import, with each call in a process of its own.

    As `isolated` with `warm`.
    """
    sent = {
        "module": "__main__",
        "qualname": qualname,
        "file": str(file),
        "cpu_s": cpu_s,
        "memory_mb": memory_mb,
        "max_output_bytes": max_output_bytes,
    }
    return _IsolatedCall(sent, INHERITED_VARIABLES, warm=True)


def _place_of(tool: Tool) -> dict[str, Any]:
    """Return where another process finds the function: in a module, or in a script's file."""
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
    return {"module": module, "qualname": qualname, "file": file and str(Path(file).resolve())}


class _IsolatedCall:
    """Take the function's place: send each call to a worker."""

    def __init__(self, sent: dict[str, Any], variables: tuple[str, ...], warm: bool) -> None:
        self._sent = sent
        self._variables = variables
        self._warm = warm
        self._idle: list[_Worker] = []
        weakref.finalize(self, _end_workers, self._idle)  # at exit too

    async def __call__(self, **arguments: Any) -> str:
        worker = self._take_worker()
        folder = tempfile.mkdtemp(prefix="isolated-")
        report = None
        try:
            report = await worker.run(self._request(folder, arguments))
        finally:
            await asyncio.to_thread(self._clean_up, worker, folder, report is not None)
        if report is None:
            report = {"answer": "", "status": worker.exit_status}
        return self._text_of(report["answer"], report["status"])

    def _take_worker(self) -> "_Worker":
        while self._idle:
            worker = self._idle.pop()
            if worker.exit_status is None:
                return worker
            worker.end()
        return _Worker(self._variables)

    def _clean_up(self, worker: "_Worker", folder: str, is_whole: bool) -> None:
        if self._warm and is_whole:
            self._idle.append(worker)
        else:
            worker.end()
        shutil.rmtree(folder, ignore_errors=True)

    def _request(self, folder: str, arguments: dict[str, Any]) -> bytes:
        sys_path = [str(Path(entry).resolve()) for entry in sys.path]
        request = {**self._sent, "sys_path": sys_path, "folder": folder, "arguments": arguments}
        return json.dumps(request).encode() + b"\n"

    def _text_of(self, answer: str, status: int | None) -> str:
        if len(answer) > self._sent["max_output_bytes"]:
            raise ToolFailure(f"The result is longer than {self._sent['max_output_bytes']} bytes.")
        if not answer.endswith("\n"):
            raise ToolFailure(f"Ended without a result: {self._cause(status)}.")
        found = json.loads(answer)
        if "error" in found:
            raise ToolFailure(found["error"])
        return found["text"]

    def _cause(self, status: int | None) -> str:
        if status is None or status >= 0:
            return f"exit status {status}"
        if -status == signal.SIGXCPU:
            return f"{self._sent['cpu_s']} s of processor time used up"
        return f"killed by {signal.Signals(-status).name}"


class _Worker:
    """Fork a process for each call, one at a time. Belongs to no event loop."""

    def __init__(self, variables: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own file, by this Python
                [sys.executable, "-I", str(_WORKER), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in variables if name in os.environ},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def exit_status(self) -> int | None:
        return self._process.poll()

    async def run(self, request: bytes) -> dict[str, Any] | None:
        """Return the report of one call, or None if the worker died before it wrote one."""
        loop = asyncio.get_running_loop()
        report = bytearray()
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(self._socket, request)
            while not report.endswith(b"\n"):
                piece = await loop.sock_recv(self._socket, _PIECE)
                if not piece:
                    return None
                report += piece
            return json.loads(report)
        return None

    def end(self) -> None:
        """End the worker with everything its call started; returns once it is gone."""
        self._socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it never came to look: still at the import
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _end_workers(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
