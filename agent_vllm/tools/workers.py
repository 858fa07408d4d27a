"""Run sync functions on threads and coroutines on one event loop, with a timeout.

Invariant: the wait for a call ends in time, and whatever the call raises is a `ToolFailure` (or a
`ToolInterrupted`). A thread that still runs a call nobody waits for is interrupted and never used
again; at most `MAX_HANGING_CALLS` such threads may be outstanding. Threads and the loop serve every
rollout of the program, so what user code caches in them lives on.
"""

import asyncio
import atexit
import contextlib
import contextvars
import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from agent_vllm.blocking import run_in_waiting_thread
from agent_vllm.tools.results import ToolFailure, failure

T = TypeVar("T")

MAX_HANGING_CALLS = 64
_IDLE_S = 2.0  # an idle thread ends after this time without a call
_PING_S = 0.5  # time for a loop to answer
_CANCEL_S = 2.0  # time for cancelled tasks to end

_log = logging.getLogger(__name__)
_idle: list["Worker"] = []  # changed by single operations that no other thread can come between
_hanging: set[threading.Thread] = set()
_sharing = threading.Lock()  # held while a shared one is looked at or replaced
_shared_loop: "LoopThread | None" = None
_one_thread: "Worker | None" = None


class Interrupted(BaseException):
    """Raised inside a thread whose call nobody waits for any more."""


async def call_in_thread(work: Callable[[], T], name: str, timeout_s: float | None) -> T:
    """Return what `work` returns, run on a thread that does nothing else meanwhile.

    Raises:
        TimeoutError: `work` took longer; its thread was interrupted.
        ToolFailure: `work` raised, or too many earlier calls still hang.
        ToolInterrupted: `work` raised KeyboardInterrupt.
    """
    _refuse_to_pile_up()
    try:
        worker = _idle.pop()
    except IndexError:
        worker = Worker("tool", idle_s=_IDLE_S)
    worker.thread.name = f"tool {name}"
    context = contextvars.copy_context()
    try:
        return await asyncio.wait_for(worker.call(lambda: context.run(work)), timeout_s)
    finally:
        if not worker.is_given_up:
            _idle.append(worker)


async def call_in_one_thread(work: Callable[[], T], name: str, timeout_s: float | None) -> T:
    """Return what `work` returns, run on the same thread as in every other call of this function.

    Raises:
        TimeoutError: `work` took longer; another thread takes over, with a warning.
        ToolFailure: `work` raised, or there is no thread.
        ToolInterrupted: `work` raised KeyboardInterrupt.
    """
    global _one_thread
    with _sharing:
        if _one_thread is None or _one_thread.is_given_up:
            _one_thread = Worker("tools on one thread")
        worker = _one_thread
    context = contextvars.copy_context()
    try:
        return await asyncio.wait_for(worker.call(lambda: context.run(work)), timeout_s)
    finally:
        if worker.is_given_up:
            _log.warning(
                "A call of `%s` was given up. Tools with runs_in='one_thread' go on in a new "
                "thread: what they opened in the old one can't be used there.",
                name,
            )


async def call_in_main(work: Callable[[], T], name: str, timeout_s: float | None) -> T:
    """Return what `work` returns, run on the thread that started the rollout.

    Nothing can interrupt it there: once its time is up, others wait until it ends.

    Raises:
        TimeoutError: `work` took longer.
        ToolFailure: `work` raised.
        ToolInterrupted: `work` raised KeyboardInterrupt.
    """
    outcome: Future[T] = Future()
    context = contextvars.copy_context()

    def job() -> None:
        if outcome.set_running_or_notify_cancel():
            _run(lambda: context.run(work), outcome)

    run_in_waiting_thread(job)
    return await asyncio.wait_for(asyncio.wrap_future(outcome), timeout_s)


class Worker:
    """Run one sync call after another on a thread.

    Once the caller stops waiting for the running call, the worker is given up: its thread is
    interrupted, queued calls are refused, and another worker must take over.

    Args:
        name: of the thread.
        idle_s: seconds without a call after which the thread ends if it is among the idle ones;
            None: it waits for `stop`.

    Raises:
        ToolFailure: too many earlier calls still hang, or the process has no thread left.
    """

    def __init__(self, name: str, idle_s: float | None = None) -> None:
        _refuse_to_pile_up()
        self.is_given_up = False
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self.thread = _started_thread(self._work, name)

    async def call(self, work: Callable[[], T]) -> T:
        """Return what `work` returns.

        Raises:
            ToolFailure: `work` raised.
            ToolInterrupted: `work` raised KeyboardInterrupt.
        """
        outcome: Future[T] = Future()
        self._jobs.put((work, outcome))
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            if not outcome.cancel():  # it is running
                self._give_up()
            raise

    def stop(self) -> None:
        """End the thread after its queued calls; returns at once."""
        self._jobs.put(None)

    def _work(self) -> None:
        process = os.getpid()
        with contextlib.suppress(Interrupted):  # it came late
            while not self.is_given_up and (job := self._next()) is not None:
                if job[1].set_running_or_notify_cancel():
                    _run(*job)
                if os.getpid() != process:
                    os._exit(0)  # a copy of the process, forked by the call, that went on
                del job  # an idle thread keeps nothing alive

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        while True:
            try:
                return self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                with contextlib.suppress(ValueError):  # a caller has just taken it
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
        _interrupt(self.thread)


def shared_loop() -> "LoopThread":
    """Return the event loop of all async tools, users and environments.

    It lives as long as the program. Once a call holds it and can't be interrupted, another takes
    its place, with a warning.

    Raises:
        ToolFailure: the process has no thread or file descriptor left.
    """
    global _shared_loop
    with _sharing:
        if _shared_loop is not None and _shared_loop.is_stuck:
            _log.warning(
                "A call of `%s` holds the event loop and can't be interrupted. Async tools go on "
                "in a new loop: clients, locks and pools that they cached belong to the old one. "
                "Let it await what takes time, or make it a sync function.",
                _shared_loop.held_by,
            )
            _shared_loop = None
        if _shared_loop is None:
            _shared_loop = LoopThread()
        return _shared_loop


@atexit.register
def _stop_shared_loop() -> None:
    """Let what still runs on the loop clean up."""
    if _shared_loop is not None and not _shared_loop.is_stuck:
        _shared_loop.stop(timeout_s=_CANCEL_S)


def _forget_threads() -> None:
    """Start afresh in a forked process, in which none of the threads exists."""
    global _one_thread, _shared_loop, _sharing
    _sharing, _shared_loop, _one_thread = threading.Lock(), None, None
    _idle.clear()
    _hanging.clear()


os.register_at_fork(after_in_child=_forget_threads)


class LoopThread:
    """Run an event loop on its own thread, so that a coroutine that never yields stalls no rollout.

    Attributes:
        is_stuck: a coroutine holds the loop and can't be interrupted. Use another one.
        held_by: name of the call that holds it.
        loop: the event loop itself.

    Raises:
        ToolFailure: the process has no thread or file descriptor left.
    """

    def __init__(self) -> None:
        self.is_stuck = False
        self.held_by = ""
        self._is_being_freed = False
        try:
            self.loop = asyncio.new_event_loop()
        except OSError as error:
            raise ToolFailure(f"Not run: no event loop could be made ({error}).") from error
        try:
            self._thread = _started_thread(self._run, "async tools")
        except ToolFailure:
            self.loop.close()
            raise

    async def call(self, work: Callable[[], Awaitable[T]], name: str, timeout_s: float | None) -> T:
        """Return what the awaitable that `work` gives returns; `name` is the call's in warnings.

        Raises:
            TimeoutError: it took longer; its task was cancelled.
            ToolFailure: it raised, or cancelled itself.
            ToolInterrupted: it raised KeyboardInterrupt.
        """
        future = asyncio.run_coroutine_threadsafe(_run_async(work, name), self.loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            await self._free(name)
            raise

    def stop(self, timeout_s: float) -> None:
        """Cancel the remaining tasks and end the thread; wait no longer than `timeout_s`."""
        asyncio.run_coroutine_threadsafe(self._stop(cancel=True), self.loop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            # What gets here is an interrupt that came late, or a background task's SystemExit.
            with contextlib.suppress(BaseException):
                self.loop.run_forever()
                break
        self.loop.close()

    async def _stop(self, *, cancel: bool) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if cancel:
            for task in tasks:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S if cancel else None)
        await self.loop.shutdown_asyncgens()
        self.loop.stop()

    async def _free(self, name: str) -> None:
        """Interrupt a task that holds the loop; give the loop up if that does not help.

        Of calls that time out together one does this, and the others wait for it.
        """
        while self._is_being_freed:
            await asyncio.sleep(0.01)
        if self.is_stuck:
            return
        self._is_being_freed = True
        try:
            if await self._answers():
                return
            task = asyncio.current_task(self.loop)
            self.held_by = task.get_name() if task is not None else name
            _interrupt(self._thread)
            if await self._answers():
                return
            self.is_stuck = True  # the tasks that wait on it may still end in their time
            asyncio.run_coroutine_threadsafe(self._stop(cancel=False), self.loop)
        finally:
            self._is_being_freed = False

    async def _answers(self) -> bool:
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        give_up = time.monotonic() + _PING_S
        while not answered.is_set() and time.monotonic() < give_up:
            await asyncio.sleep(0.01)
        return answered.is_set()


def _started_thread(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True, name=name)
    try:
        thread.start()
    except RuntimeError as error:  # the process or the machine has no more
        raise ToolFailure(f"Not run: no thread could be started ({error}).") from error
    return thread


def _interrupt(thread: threading.Thread) -> None:
    """Raise `Interrupted` in a thread at its next step of Python code."""
    if thread.is_alive():
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Interrupted))


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
        except BaseException as error:  # SystemExit and its like are a tool's trouble too
            outcome.set_exception(failure(error))
        else:
            outcome.set_result(value)


async def _run_async(work: Callable[[], Awaitable[T]], name: str) -> T:
    """Tell a task that cancelled itself, which is its own failure, from one that is cancelled."""
    task = asyncio.create_task(_guarded(work), name=name)
    try:
        return await task
    except asyncio.CancelledError as error:
        if task.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
            raise ToolFailure("CancelledError") from error
        task.cancel()
        raise


async def _guarded(work: Callable[[], Awaitable[T]]) -> T:
    try:
        return await work()
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the loop of all async tools
        raise failure(error) from error
