"""Work on threads that somebody waits for only so long.

Owns the threads whose time ran out. Invariant: the wait ends in time; a thread that nobody waits
for is interrupted, and only so many may hang.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from agent_vllm.tools.results import ToolFailure

T = TypeVar("T")

MAX_HANGING_CALLS = 64

_hanging: set[threading.Thread] = set()


class Interrupted(BaseException):
    """Raised inside a thread whose call nobody waits for any more."""


def interrupt(thread: threading.Thread) -> None:
    """Ask a thread to end: raises `Interrupted` in it at its next step of Python code."""
    if thread.is_alive():
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Interrupted))


async def call_in_thread(work: Callable[[], T], name: str, timeout_s: float | None) -> T:
    """What `work` returns or raises, on a thread of its own.

    Raises:
        TimeoutError: `work` took longer; its thread was interrupted.
        ToolFailure: too many earlier calls still hang.
    """
    _refuse_to_pile_up()
    outcome: Future[T] = Future()
    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(_run, work, outcome), daemon=True, name=f"tool {name}"
    )
    thread.start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(outcome), timeout_s)
    except (TimeoutError, asyncio.CancelledError):
        _hanging.add(thread)
        interrupt(thread)
        raise


def _refuse_to_pile_up() -> None:
    for thread in list(_hanging):
        if not thread.is_alive():
            _hanging.discard(thread)
    if len(_hanging) >= MAX_HANGING_CALLS:
        raise ToolFailure(f"Not run: {len(_hanging)} earlier calls that timed out still hang.")


def _run(work: Callable[[], T], outcome: Future[T]) -> None:
    with contextlib.suppress(InvalidStateError, Interrupted):  # the caller gave up waiting
        try:
            value = work()
        except Interrupted:
            raise
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(value)
