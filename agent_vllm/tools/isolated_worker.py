"""What runs as a worker of isolated calls: `python -I isolated_worker.py SOCKET`.

It imports the tool's module, and each call runs in a child forked from there. Requests and reports
are JSON, a line each. Standard library only; `results.py` is loaded from its file, so that neither
torch nor transformers is imported. Invariant: a call reaches nothing of the next one, and when its
report is written, all that it started is gone.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PIECE = 1 << 16


def main() -> None:
    # Whoever leaves its parent and its session becomes a child of this process, and ends with it.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with (
        socket.socket(fileno=int(sys.argv[1])) as caller,
        contextlib.suppress(ConnectionError),  # the caller is gone
    ):
        for line in caller.makefile("rb"):
            report = _report(json.loads(line), caller)
            caller.sendall(json.dumps(report).encode() + b"\n")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _report(request: dict[str, Any], caller: socket.socket) -> dict[str, Any]:
    """`answer` is the JSON that the call wrote, `status` how it ended."""
    try:
        with _limited_softly(request):
            function = _find(request)
    except BaseException as error:  # SystemExit too, which a script raises where it is imported
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
    """What the child writes until it has ended, wrote too much or nobody waits any more."""
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
    """Kill the child and all that it started; returns how the child ended."""
    _kill(child)
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(ChildProcessError):  # there is none left
        while True:  # each that ends may leave its own children to this process
            for orphan in Path("/proc/thread-self/children").read_text().split():
                _kill(int(orphan))
            os.waitpid(-1, 0)
    return os.waitstatus_to_exitcode(status)


def _kill(process: int) -> None:
    """Process and group of one that nobody but this process waits for: the number is its own."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)


# ---- limits ----


def _limits(request: dict[str, Any]) -> dict[int, int]:
    limits = {
        resource.RLIMIT_CPU: request["cpu_s"],
        resource.RLIMIT_AS: request["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: request["max_output_bytes"],
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        allowed = resource.getrlimit(limit)[1]
        limits[limit] = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
    return limits


@contextlib.contextmanager
def _limited_softly(request: dict[str, Any]) -> Iterator[None]:
    """For the import, which this process survives: the limits can be lifted again."""
    before = {limit: resource.getrlimit(limit) for limit in _limits(request)}
    for limit, value in _limits(request).items():
        resource.setrlimit(limit, (value, before[limit][1]))
    try:
        yield
    finally:
        for limit, both in before.items():
            resource.setrlimit(limit, both)


def _limit(request: dict[str, Any]) -> None:
    for limit, value in _limits(request).items():
        # At the soft limit of processor time comes a signal, and a second later the end.
        is_lowest = value == resource.getrlimit(limit)[1]
        hard = value + 1 if limit == resource.RLIMIT_CPU and not is_lowest else value
        resource.setrlimit(limit, (value, hard))


# ---- in the child ----


def _call(function: Callable[..., Any], request: dict[str, Any], writing: int) -> NoReturn:
    os.setpgid(0, 0)
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
