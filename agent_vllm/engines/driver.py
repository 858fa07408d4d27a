"""Step a batch engine on one thread while anyone waits for it.

Owns the queue between many waiting coroutines (on any event loop) and an engine that must be called
from one thread, and the watchdog of that engine. Invariant: every request is answered once, with a
completion or an error, even if the engine hangs.

An engine that fails one step continues without the requests that were in it. It is dead when steps
fail repeatedly, when it can't drop what a failed step left, or when it makes no progress for
`hang_s`. A thread inside native code can't be killed, so it is left behind. (Native code that also
holds the GIL stops the whole process; the watchdog can't see that.)
"""

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Protocol, TypeVar

import torch

from agent_vllm.engines.request import GenerationRequest
from agent_vllm.errors import EngineBusyError, EngineDeadError, EngineError
from agent_vllm.types import Completion

T = TypeVar("T")
Outcome = Completion | Exception
Errand = tuple[Callable[[], object], Future]

HANG_S = 600.0  # a step that compiles on first use takes minutes on a GPU
_MAX_FAILED_STEPS = 5  # in a row; two requests that always fail make at most three

_log = logging.getLogger(__name__)


class StepEngine(Protocol):
    """Define the engine that a driver steps. Every method is called on the driver's thread."""

    def add(self, request: GenerationRequest) -> None: ...

    def step(self) -> Iterable[tuple[GenerationRequest, Outcome]]:
        """Advance all requests; return those that are done.

        An `EngineDeadError` ends the engine. After any other error it must be fit for new requests.
        """
        ...

    def abort(self, requests: Iterable[GenerationRequest]) -> None:
        """Drop requests that are in the engine."""
        ...


class StepDriver:
    """Drive a `StepEngine`. Its thread starts with the first use and sleeps when idle.

    Args:
        hang_s: seconds without progress after which the engine is dead; None disables it. Errands
            that run before `attach` are not watched.
    """

    def __init__(self, name: str, *, hang_s: float | None = None) -> None:
        if hang_s is not None and hang_s <= 0:
            raise ValueError(f"`hang_s` must be more than 0, got {hang_s}. Use None for no watch.")
        self._name = name
        self._hang_s = hang_s
        self._engine: StepEngine
        self._is_attached = False
        self._changed = threading.Condition()
        self._incoming: list[GenerationRequest] = []
        self._cancelled: list[GenerationRequest] = []
        self._errands: list[Errand] = []  # the one that runs among them
        self._waiting: dict[GenerationRequest, asyncio.Future[Completion]] = {}
        self._death: str | None = None
        self._last_errand: Errand | None = None
        self._num_failed_steps = 0
        self._thread: threading.Thread | None = None
        self._progress_at: float | None = None  # None while idle
        self._is_over = threading.Event()  # the thread has ended, or was left behind

    def attach(self, engine: StepEngine) -> None:
        self._engine = engine
        self._is_attached = True

    @property
    def death(self) -> str | None:
        """Return why the engine is dead, or None while it is alive."""
        return self._death

    def note_progress(self) -> None:
        """Reset the watchdog; an engine calls this during a long step."""
        self._progress_at = time.monotonic()

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
        """Run a function on the driver's thread while no request is in flight, and wait for it.

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
            self._start_thread()
            self._changed.notify()
        return errand.result()

    def close(self, finish: Callable[[], object] = lambda: None) -> None:
        """End the thread after it runs `finish`; requests that still wait get an error.

        A thread that hangs is not waited for. It runs `finish` if it ever returns.
        """
        done: Future = Future()
        self._die("The engine is closed.")
        with self._changed:
            if self._last_errand is not None:
                return
            self._last_errand = (finish, done)
            self._changed.notify()
        if self._thread is not None:
            self._is_over.wait()
        if done.done():
            done.result()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _wake(self) -> None:
        with self._changed:
            self._start_thread()
            self._changed.notify()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            self._thread.start()
            if self._hang_s is not None:
                name = f"{self._name} watchdog"
                watchdog = threading.Thread(
                    target=self._watch, args=(self._hang_s,), daemon=True, name=name
                )
                watchdog.start()

    def _watch(self, hang_s: float) -> None:
        while not self._is_over.wait(hang_s / 4):
            since = self._progress_at
            if self._is_attached and since is not None and time.monotonic() - since > hang_s:
                self._die(f"The engine hangs: it has made no progress for {hang_s:g} s.")
                self._is_over.set()

    def _run(self) -> None:
        try:
            self._drive()
        except BaseException as error:
            _log.exception("The thread of the %s failed.", self._name)
            _free_memory_of(error)
            self._die(f"The engine's thread failed: {type(error).__name__}: {error}")
        with self._changed:
            while self._last_errand is None:
                self._progress_at = None
                self._changed.wait()
        self.note_progress()
        _run_errand(self._last_errand)
        self._is_over.set()

    def _drive(self) -> None:
        """Step the engine until it is dead or closed."""
        in_engine: set[GenerationRequest] = set()
        while True:
            with self._changed:
                while not (self._incoming or self._cancelled or self._errands or in_engine):
                    if self._death is not None:
                        return
                    self._progress_at = None
                    self._changed.wait()
                if self._death is not None:
                    return
                incoming, self._incoming = self._incoming, []
                cancelled, self._cancelled = set(self._cancelled), []
                errands = list(self._errands)
            self.note_progress()
            self._drop(cancelled & in_engine)
            in_engine -= cancelled
            while errands:  # drop each one after it ran: it may hold a learner
                errand = errands.pop(0)
                _run_errand(errand)
                self._forget(errand)
                del errand
            in_engine |= self._admit([r for r in incoming if r not in cancelled])
            if in_engine:
                in_engine -= self._step(in_engine)

    def _forget(self, errand: Errand) -> None:
        with self._changed:
            self._errands = [other for other in self._errands if other is not errand]
        self.note_progress()

    def _admit(self, requests: list[GenerationRequest]) -> set[GenerationRequest]:
        """Add requests to the engine; one that it refuses fails alone."""
        admitted = set()
        for request in requests:
            try:
                self._engine.add(request)
                admitted.add(request)
            except Exception as error:
                self._answer([(request, _as_engine_error(error))])
        return admitted

    def _step(self, in_engine: set[GenerationRequest]) -> set[GenerationRequest]:
        """Run one step; return the requests that left. If it fails, all requests in it fail."""
        try:
            done = list(self._engine.step())
            self._num_failed_steps = 0
        except Exception as error:
            done = self._give_up(in_engine, error)
        self._answer(done)
        return {request for request, _ in done}

    def _give_up(
        self, in_engine: set[GenerationRequest], error: Exception
    ) -> list[tuple[GenerationRequest, Outcome]]:
        """Drop a failed step's requests from the engine."""
        failure = _as_engine_error(error)
        _log.warning("A step with %d requests failed: %s", len(in_engine), failure)
        self._num_failed_steps += 1
        self._drop(in_engine)
        _free_memory_of(error)
        if isinstance(error, EngineDeadError):
            self._die(str(error))
        elif self._num_failed_steps == _MAX_FAILED_STEPS:
            self._die(f"{_MAX_FAILED_STEPS} steps in a row failed, the last one: {failure}")
        return [(request, failure) for request in in_engine]

    def _drop(self, requests: set[GenerationRequest]) -> None:
        if requests:
            self._engine.abort(requests)

    def _die(self, reason: str) -> None:
        """Answer all waiting and all later requests with the reason."""
        with self._changed:
            self._death = self._death or reason
            errands, self._errands = self._errands, []
            waiting = list(self._waiting)
            self._changed.notify()
        for _, errand in errands:
            with contextlib.suppress(InvalidStateError):  # it came to its end just now
                errand.set_exception(EngineDeadError(reason))
        self._answer([(request, EngineDeadError(reason)) for request in waiting])

    def _answer(self, done: Iterable[tuple[GenerationRequest, Outcome]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future, Outcome]]] = {}
        with self._changed:
            for request, outcome in list(done):
                future = self._waiting.pop(request, None)
                if future is not None:
                    by_loop.setdefault(future.get_loop(), []).append((future, outcome))
        for loop, answers in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: list[tuple[asyncio.Future, Outcome]]) -> None:
    for future, outcome in answers:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _run_errand(errand: Errand) -> None:
    function, done = errand
    with contextlib.suppress(InvalidStateError):  # the watchdog gave up on it meanwhile
        try:
            result = function()
        except BaseException as error:  # handed to the caller's thread
            done.set_exception(error)
        else:
            done.set_result(result)


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    wrapped = EngineError(f"The engine failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _free_memory_of(error: BaseException) -> None:
    """Free the memory that a failed step holds in its frames."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
