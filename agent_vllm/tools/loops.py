"""An event loop on a thread of its own, so that a tool that never yields stalls no rollout.

Invariant: a call ends in time, and the thread ends once the loop is given up or stopped and its
tool lets go of it.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from agent_vllm.tools.results import ToolFailure
from agent_vllm.tools.threads import interrupt

T = TypeVar("T")

_PING_S = 0.2
_CANCEL_S = 2.0


class LoopThread:
    """Runs coroutines; `is_stuck` once one of them holds the loop and can't be interrupted."""

    def __init__(self) -> None:
        self.is_stuck = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="async tools")
        self._thread.start()

    async def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """What `work` returns or raises.

        Raises:
            TimeoutError: it took longer; its task was cancelled.
            ToolFailure: it cancelled itself.
        """
        future = asyncio.run_coroutine_threadsafe(_shielded(work), self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            await self._free()
            raise

    def stop(self) -> None:
        """Cancel what still runs and end the thread; returns at once."""
        asyncio.run_coroutine_threadsafe(self._stop(cancel=True), self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
                break
            except BaseException:  # an interrupt that came late, or a background task's SystemExit
                continue
        self._loop.close()

    async def _stop(self, *, cancel: bool) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if cancel:
            for task in tasks:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S if cancel else None)
        await self._loop.shutdown_asyncgens()
        self._loop.stop()

    async def _free(self) -> None:
        """Interrupt a task that holds the loop; give the loop up if that does not help."""
        if self.is_stuck or await self._answers():
            return
        interrupt(self._thread)
        if await self._answers() or self.is_stuck:  # given up by another call meanwhile
            return
        self.is_stuck = True  # the tasks that wait on it may still end in their time
        asyncio.run_coroutine_threadsafe(self._stop(cancel=False), self._loop)

    async def _answers(self) -> bool:
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        give_up = time.monotonic() + _PING_S
        while not answered.is_set() and time.monotonic() < give_up:
            await asyncio.sleep(0.01)
        return answered.is_set()


async def _shielded(work: Coroutine[Any, Any, T]) -> T:
    """Tells a task that cancelled itself, its own trouble, from one that is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await task
    except asyncio.CancelledError as error:
        if task.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
            raise ToolFailure("CancelledError") from error
        task.cancel()
        raise
