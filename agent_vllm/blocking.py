"""Run a coroutine from code that is not async: a script, a thread, a notebook."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result. Inside a running event loop (a notebook) a thread runs it.

    Ctrl-C cancels the coroutine, lets it clean up, and raises KeyboardInterrupt.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return _run_in_thread(coroutine)


def _run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    outcome: list[tuple[T | None, BaseException | None]] = []
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def work() -> None:
        try:
            outcome.append((loop.run_until_complete(task), None))
        except BaseException as error:  # handed to the caller's thread below
            outcome.append((None, error))
        finally:
            loop.close()

    thread = threading.Thread(target=work, name="rollout")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
