"""Run a coroutine from code that is not async: a script, a thread, a notebook.

Owns the thread that waits for the coroutine. Invariant: the coroutine runs on another thread, so
that the waiting one is free to run what must run there, one piece of work after another.
"""

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Jobs = queue.SimpleQueue[Callable[[], object] | None]
_waiting: contextvars.ContextVar[_Jobs | None] = contextvars.ContextVar("waiting", default=None)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result.

    A thread with an event loop of its own runs it, so this works inside a running loop (a notebook)
    too. Ctrl-C cancels the coroutine, lets it clean up, and raises KeyboardInterrupt.
    """
    jobs: _Jobs = queue.SimpleQueue()
    outcome: Future[T] = Future()
    context = contextvars.copy_context()
    context.run(_waiting.set, jobs)
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine, context=context)
    thread = threading.Thread(target=_run, args=(loop, task, outcome), name="rollout")
    outcome.add_done_callback(lambda _: jobs.put(None))
    thread.start()
    try:
        while (job := jobs.get()) is not None:
            job()
    except KeyboardInterrupt:
        with contextlib.suppress(RuntimeError):  # the loop has just ended
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()
    return outcome.result()


def run_in_waiting_thread(job: Callable[[], object]) -> None:
    """Have the thread that waits in `run_blocking` run `job`, which must not raise.

    Returns at once. Where nobody waits (`await rollout_batch_async(...)`), the thread of the event
    loop runs it.
    """
    jobs = _waiting.get()
    if jobs is None:
        asyncio.get_running_loop().call_soon(job)
    else:
        jobs.put(job)


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], outcome: Future[T]) -> None:
    async def joined() -> T:
        return await task

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            value = runner.run(joined())
    except BaseException as error:  # handed to the waiting thread
        outcome.set_exception(error)
    else:
        outcome.set_result(value)
