"""Work on threads that somebody waits for only so long.

Owns the threads that calls run on. A thread does one call after another, as starting one takes
longer than most of what an event loop does for a call. Invariant: the wait ends in time; a thread
whose call nobody waits for any more is interrupted and never used again, and only so many may hang.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from agent_vllm.tools.results import ToolFailure

T = TypeVar("T")

MAX_HANGING_CALLS = 64
_IDLE_S = 2.0  # a thread that anybody may use ends after this time without a call

_idle: list["Worker"] = []  # changed by single operations that no other thread can come between
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
    worker = _free_worker()
    worker.thread.name = f"tool {name}"
    context = contextvars.copy_context()
    try:
        return await asyncio.wait_for(worker.call(lambda: context.run(work)), timeout_s)
    finally:
        if not worker.is_given_up:
            _idle.append(worker)


def _free_worker() -> "Worker":
    try:
        return _idle.pop()
    except IndexError:
        return Worker("tool", idle_s=_IDLE_S)


class Worker:
    """A thread that does one piece of work after another.

    Once somebody stops waiting for the piece at work it is given up: the thread is interrupted,
    what waits behind that piece is refused, and another worker must take over.

    Args:
        idle_s: seconds without work after which the thread ends if it is among the idle ones;
            None: it waits for `stop`.

    Raises:
        ToolFailure: too many earlier calls still hang.
    """

    def __init__(self, name: str, idle_s: float | None = None) -> None:
        _refuse_to_pile_up()
        self.is_given_up = False
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True, name=name)
        self.thread.start()

    async def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""
        outcome: Future[T] = Future()
        self._jobs.put((work, outcome))
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            if not outcome.cancel():  # it is at work
                self._give_up()
            raise

    def stop(self) -> None:
        """End the thread when its work is done; returns at once."""
        self._jobs.put(None)

    def _work(self) -> None:
        process = os.getpid()
        with contextlib.suppress(Interrupted):  # it came late
            while not self.is_given_up and (job := self._next()) is not None:
                if job[1].set_running_or_notify_cancel():
                    _run(*job)
                if os.getpid() != process:
                    os._exit(0)  # a copy of the process that the work forked and let go on
                del job  # an idle thread keeps nothing alive

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        while True:
            try:
                return self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                with contextlib.suppress(ValueError):  # somebody has just taken it
                    _idle.remove(self)
                    return None

    def _give_up(self) -> None:
        self.is_given_up = True
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None and job[1].set_running_or_notify_cancel():
                    job[1].set_exception(ToolFailure("Not run: the call before it hangs."))
        self.stop()
        _hanging.add(self.thread)
        interrupt(self.thread)


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
