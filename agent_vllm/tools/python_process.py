"""Run a model's Python code in a process that ends with the call; loaded there from its file.

Standard library only. Invariant: whatever the code prints, by whatever means, is in the result.
"""

import ast
import contextlib
import linecache
import os
import sys
import traceback
from typing import Any

_FILE = "<code>"


def run(code: str, max_output_chars: int) -> str:
    """Return what the code writes to stdout and stderr, then its last value or its traceback."""
    log = os.open("output", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.unlink("output")
    for stream in (1, 2):  # of the process: what it starts and C code write there too
        os.dup2(log, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w", encoding="utf-8", errors="replace", buffering=1)
    try:
        last = _run(code)
    except SystemExit as error:
        last = "" if error.code in (None, 0) else f"SystemExit: {error.code}"
    except BaseException as error:  # whatever the code raised is its result
        last = _traceback_of(error)
    with contextlib.suppress(OSError, ValueError):  # the file is full, or the code closed it
        sys.stdout.flush()
    return _joined(_output(log, max_output_chars), _without_middle(last, max_output_chars))


def _run(code: str) -> str:
    """Run the code as a script; return the `repr` of its last expression, if it has a value."""
    lines = code.splitlines(keepends=True)
    linecache.cache[_FILE] = (len(code), None, lines, _FILE)  # for tracebacks
    tree = ast.parse(code, _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(tree, _FILE, "exec"), names)  # noqa: S102 - its purpose
    if not isinstance(last, ast.Expr):
        return ""
    value = eval(compile(ast.Expression(last.value), _FILE, "eval"), names)  # noqa: S307
    return "" if value is None else repr(value)


def _traceback_of(error: BaseException) -> str:
    """Return the traceback of the code's own frames."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != _FILE:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def _output(log: int, max_chars: int) -> str:
    size = os.fstat(log).st_size
    text = os.pread(log, 4 * max_chars, 0).decode("utf-8", "replace")  # 4 bytes at most each
    if len(text) <= max_chars and size <= 4 * max_chars:
        return text
    return f"{text[:max_chars]}\n[... output cut after {max_chars} characters]"


def _without_middle(text: str, max_chars: int) -> str:
    num_cut = len(text) - max_chars
    if num_cut <= 0:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {num_cut} characters cut]\n{text[len(text) - max_chars + half :]}"


def _joined(output: str, last: str) -> str:
    between = "\n" if output and last and not output.endswith("\n") else ""
    return f"{output}{between}{last}".rstrip("\n")
