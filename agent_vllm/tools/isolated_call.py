"""What runs in the process of an isolated call: `python -I isolated_call.py`, a request on stdin.

Standard library only; `results.py` is loaded from its file, so that neither torch nor transformers
is imported. Invariant: the last line written to the answer's pipe is the call's one answer, and
nothing that the function prints reaches that pipe.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import resource
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def main() -> None:
    request = json.load(sys.stdin)
    answer_fd = _take_stdout()
    answer = json.dumps(_answer(request)).encode()
    _write_all(answer_fd, answer + b"\n")
    os._exit(0)  # threads and exit handlers that the function left behind don't matter


def _take_stdout() -> int:
    """The pipe to the caller under another number; prints go nowhere."""
    answer_fd = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    return answer_fd


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
        # At the soft limit of processor time comes a signal, and a second later the end.
        hard = value + 1 if limit == resource.RLIMIT_CPU and value != allowed else value
        resource.setrlimit(limit, (value, hard))


def _answer(request: dict[str, Any]) -> dict[str, str]:
    results = _module_from(Path(__file__).with_name("results.py"), "agent_vllm_results")
    try:
        _limit(request)
        value = _find(request)(**request["arguments"])
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        return {"text": results.encode_result(value)}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the caller goes on
        return {"error": _message(results, error)}


async def _await(value: Any) -> Any:
    return await value


def _message(results: ModuleType, error: BaseException) -> str:
    failed = results.failure(error)
    return str(failed) or type(error).__name__


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
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
