"""Carry requests and errands to an engine's thread, and answers back to whoever waits.

Callers are coroutines on any event loop, and threads. Invariant: every request and errand is
answered once, with a result or an error, even if the engine's thread never answers.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TypeVar

from agent_vllm.engines.request import GenerationRequest
from agent_vllm.errors import EngineBusyError, EngineDeadError
from agent_vllm.types import Completion

T = TypeVar("T")
Outcome = Completion | Exception
Errand = tuple[Callable[[], object], Future]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Hold what the engine's thread does before its next step."""

    cancelled: set[GenerationRequest]
    errands: list[Errand]
    incoming: list[GenerationRequest]  # without the cancelled ones


class Mailbox:
    """Hold what was asked of an engine and who waits for it.

    Args:
        start: starts the engine's thread if it does not run yet.

    Attributes:
        death: why nothing more is answered, or None.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        self.death: str | None = None
        self._start = start
        self._changed = threading.Condition()
        self._incoming: list[GenerationRequest] = []
        self._cancelled: list[GenerationRequest] = []
        self._errands: list[Errand] = []  # the one that runs among them
        self._waiting: dict[GenerationRequest, asyncio.Future[Completion]] = {}
        self._last_errand: Errand | None = None

    # ---- callers ----

    async def submit(self, request: GenerationRequest) -> Completion:
        """Wait for one request. Cancelling the wait drops the request from the engine.

        Raises:
            EngineDeadError: the engine died, or is closed.
            EngineError: the engine failed while it held the request.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        with self._changed:
            self._check_alive()
            self._waiting[request] = future
            self._incoming.append(request)
        # Wake the thread after all ready coroutines have submitted: one batch, not one each.
        loop.call_soon(self._wake)
        try:
            return await future
        except asyncio.CancelledError:
            with self._changed:
                self._waiting.pop(request, None)
                self._cancelled.append(request)
                self._changed.notify()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread while no request is in flight, and wait for it.

        Raises:
            EngineBusyError: requests are in flight.
            EngineDeadError: the engine died, or is closed.
        """
        errand: Future = Future()
        with self._changed:
            self._check_alive()
            if self._waiting:
                raise EngineBusyError(
                    f"{len(self._waiting)} requests are in flight. Wait for the rollout to end "
                    "before weights are updated."
                )
            self._errands.append((function, errand))
            self._wake()
        return errand.result()

    def close(self, finish: Callable[[], object]) -> Future | None:
        """Leave `finish` as the last errand; return its future, or None if there is one."""
        self.die("The engine is closed.")
        with self._changed:
            if self._last_errand is not None:
                return None
            self._last_errand = (finish, Future())
            self._changed.notify()
            return self._last_errand[1]

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)

    def _wake(self) -> None:
        with self._changed:
            self._start()
            self._changed.notify()

    # ---- the engine's thread ----

    def take(self, *, is_idle: bool, rest: Callable[[], None]) -> Work | None:
        """Return what has come in, or None once the engine is dead.

        Args:
            is_idle: wait until there is something; `rest` is called before each wait.
        """
        with self._changed:
            while self.death is None and is_idle and not self._has_work():
                rest()
                self._changed.wait()
            if self.death is not None:
                return None
            cancelled, self._cancelled = set(self._cancelled), []
            incoming, self._incoming = self._incoming, []
            return Work(
                cancelled=cancelled,
                errands=list(self._errands),
                incoming=[request for request in incoming if request not in cancelled],
            )

    def take_last(self, *, rest: Callable[[], None]) -> Errand:
        """Wait for the last errand, which `close` brings."""
        with self._changed:
            while self._last_errand is None:
                rest()
                self._changed.wait()
            return self._last_errand

    def forget(self, errand: Errand) -> None:
        """Drop an errand that has run: it may hold a learner."""
        with self._changed:
            self._errands = [other for other in self._errands if other is not errand]

    def answer(self, done: Iterable[tuple[GenerationRequest, Outcome]]) -> None:
        """Hand outcomes to those who still wait, on their own event loops."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future, Outcome]]] = {}
        with self._changed:
            for request, outcome in list(done):
                future = self._waiting.pop(request, None)
                if future is not None:
                    by_loop.setdefault(future.get_loop(), []).append((future, outcome))
        for loop, answers in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, answers)

    def die(self, reason: str) -> None:
        """Answer all waiting and all later requests and errands with the reason."""
        with self._changed:
            self.death = self.death or reason
            errands, self._errands = self._errands, []
            waiting = list(self._waiting)
            self._changed.notify()
        for _, errand in errands:
            with contextlib.suppress(InvalidStateError):  # it came to its end just now
                errand.set_exception(EngineDeadError(reason))
        self.answer([(request, EngineDeadError(reason)) for request in waiting])

    def _has_work(self) -> bool:
        return bool(self._incoming or self._cancelled or self._errands)


def run_errand(errand: Errand) -> None:
    """Run an errand; its result or error goes to the caller's thread."""
    function, done = errand
    with contextlib.suppress(InvalidStateError):  # the watchdog gave up on it meanwhile
        try:
            result = function()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)


def _resolve(answers: list[tuple[asyncio.Future, Outcome]]) -> None:
    for future, outcome in answers:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
