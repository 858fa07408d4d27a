"""Work on threads that somebody waits for only so long.

Owns the threads that calls run on. A thread does one call after another, as starting one takes
longer than most of what an event loop does for a call. Invariant: the wait ends in time; a thread
whose call nobody waits for any more is interrupted and never used again, and only so many may hang.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from agent_vllm.tools.results import ToolFailure

T = TypeVar("T")

MAX_HANGING_CALLS = 64
_IDLE_S = 2.0  # a thread without a call ends after this time

# Each of these is changed by single operations that no other thread can come between.
_idle: list["_Worker"] = []
_running: dict[Future, "_Worker"] = {}  # whoever takes a call out decides about its thread
_hanging: set[threading.Thread] = set()


class Interrupted(BaseException):
    """Raised inside a thread whose call nobody waits for any more."""


def interrupt(thread: threading.Thread) -> None:
    """Ask a thread to end: raises `Interrupted` in it at its next step of Python code."""
    if thread.is_alive():
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Interrupted))


async def call_in_thread(work: Callable[[], T], name: str, timeout_s: float | None) -> T:
    """What `work` returns or raises, on a thread that does nothing else meanwhile.

    Raises:
        TimeoutError: `work` took longer; its thread was interrupted.
        ToolFailure: too many earlier calls still hang.
    """
    _refuse_to_pile_up()
    outcome: Future[T] = Future()
    context = contextvars.copy_context()
    _free_worker().begin(lambda: context.run(_run, work, outcome), outcome, name)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(outcome), timeout_s)
    except (TimeoutError, asyncio.CancelledError):
        worker = _running.pop(outcome, None)
        if worker is not None:  # else it has just ended
            _hanging.add(worker)
            interrupt(worker)
        raise


class _Worker(threading.Thread):
    """Does calls until none comes for a while, or until one of them is given up."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future]] = queue.SimpleQueue()

    def begin(self, call: Callable[[], None], outcome: Future, name: str) -> None:
        self.name = f"tool {name}"
        _running[outcome] = self
        self._calls.put((call, outcome))
        if self.ident is None:
            self.start()

    def run(self) -> None:
        with contextlib.suppress(Interrupted):
            while (next_call := self._next()) is not None:
                call, outcome = next_call
                call()
                if _running.pop(outcome, None) is None:
                    return  # given up: an interrupt may still come
                del next_call, call, outcome  # an idle thread keeps nothing alive
                _idle.append(self)

    def _next(self) -> tuple[Callable[[], None], Future] | None:
        try:
            return self._calls.get(timeout=_IDLE_S)
        except queue.Empty:
            try:
                _idle.remove(self)
            except ValueError:  # somebody has taken it for a call that is on its way
                return self._calls.get()
            return None


def _free_worker() -> _Worker:
    try:
        return _idle.pop()
    except IndexError:
        return _Worker()


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
