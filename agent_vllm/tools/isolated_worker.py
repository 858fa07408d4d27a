"""Serve isolated calls as a worker process: `python -I isolated_worker.py SOCKET`.

The worker imports the tool's module and forks a child for each call. Requests and reports are JSON
lines. Standard library only; `results.py` is loaded from its file, so that neither torch nor
transformers is imported. Invariant: a call leaves nothing to the next one, and everything that it
started is gone before its report is written.
"""

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PIECE = 1 << 16


def main() -> None:
    # Whoever leaves its parent and its session becomes a child of this process, and ends with it.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # If the caller is killed, so is this process, in the middle of an import too.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    with (
        socket.socket(fileno=_lowered(int(sys.argv[1]))) as caller,
        contextlib.suppress(ConnectionError),  # the caller is gone
    ):
        for line in caller.makefile("rb"):
            report = _report(json.loads(line), caller)
            caller.sendall(json.dumps(report).encode() + b"\n")


def _lowered(descriptor: int) -> int:
    """Move a file descriptor, which keeps its caller's number, to where `select` can watch it."""
    low = os.dup(descriptor)
    os.close(descriptor)
    return low


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _report(request: dict[str, Any], caller: socket.socket) -> dict[str, Any]:
    """Run one call; `answer` is the JSON that it wrote, `status` how it ended."""
    try:
        function = _find(request)
    except BaseException as error:  # SystemExit too, which a script raises where it is imported
        _end_children()
        return {"answer": json.dumps(_failed(error)) + "\n", "status": 0}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(caller.fileno())
            os.close(reading)
            _call(function, request, writing)
        finally:
            os._exit(1)  # whatever happened: not into the worker's loop
    os.close(writing)
    answer = _watch(child, reading, caller, request["max_output_bytes"])
    os.close(reading)
    status = _end_all(child)
    return {"answer": answer.decode("utf-8", "replace"), "status": status}


def _watch(child: int, reading: int, caller: socket.socket, max_bytes: int) -> bytes:
    """Return what the child writes until it ends, writes too much or nobody waits any more."""
    answer = b""
    ended = os.pidfd_open(child)
    watched = [reading, ended, caller]
    while len(answer) <= max_bytes:
        ready = select.select(watched, [], [])[0]
        if caller in ready:
            break
        if reading in ready:
            piece = os.read(reading, _PIECE)
            answer += piece
            if not piece:
                watched.remove(reading)
        elif ended in ready:
            break
    os.close(ended)
    return answer


def _end_all(child: int) -> int:
    """Kill the child and everything it started; return how the child ended."""
    _kill(child)
    status = os.waitpid(child, 0)[1]
    _end_children()
    return os.waitstatus_to_exitcode(status)


def _end_children() -> None:
    # Each that ends may leave its own children to this process.
    while orphans := Path("/proc/thread-self/children").read_text().split():
        for orphan in orphans:
            _kill(int(orphan))
        for orphan in orphans:
            os.waitpid(int(orphan), 0)


def _kill(process: int) -> None:
    """Kill a child of this process and its group; unreaped, the number can't be another's."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)


# ---- in the child ----


def _limit(request: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: request["cpu_s"],
        resource.RLIMIT_AS: request["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: request["max_output_bytes"],
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        allowed = resource.getrlimit(limit)[1]
        value = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        # The soft limit of processor time sends a signal; the hard one kills a second later.
        hard = value + 1 if limit == resource.RLIMIT_CPU and value != allowed else value
        resource.setrlimit(limit, (value, hard))


def _call(function: Callable[..., Any], request: dict[str, Any], writing: int) -> NoReturn:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(request["folder"])
    answer = json.dumps(_answer(function, request)).encode() + b"\n"
    while answer:
        answer = answer[os.write(writing, answer) :]
    os._exit(0)  # threads and exit handlers that the function left behind don't matter


def _answer(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, str]:
    try:
        _limit(request)
        value = function(**request["arguments"])
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        return {"text": _results.encode_result(value)}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the caller goes on
        return _failed(error)


async def _await(value: Any) -> Any:
    return await value


def _failed(error: BaseException) -> dict[str, str]:
    return {"error": str(_results.failure(error)) or type(error).__name__}


# ---- finding the function ----


def _find(request: dict[str, Any]) -> Any:
    sys.path[:] = request["sys_path"]
    found: Any
    if request["file"] is None:
        found = importlib.import_module(request["module"])
    else:  # a script: its `if __name__ == "__main__"` part is not run
        found = _module_from(Path(request["file"]), "__isolated_main__")
    for name in request["qualname"].split("."):
        found = getattr(found, name)
    return found


def _module_from(file: Path, name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_results = _module_from(Path(__file__).with_name("results.py"), "agent_vllm_results")

if __name__ == "__main__":
    main()
