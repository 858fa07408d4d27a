"""One thread that steps a batch engine for as long as anyone waits for it.

Owns the meeting of many waiting coroutines (on any event loop) with an engine that wants to be
called from one place. Invariant: every request is answered once, with a completion or an error.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from agent_vllm.engines.base import GenerationRequest
from agent_vllm.errors import EngineBusyError, EngineError
from agent_vllm.types import Completion

T = TypeVar("T")
Outcome = Completion | Exception


class StepEngine(Protocol):
    """What the driver drives; all of it is called on the driver's thread."""

    def add(self, request: GenerationRequest) -> None: ...

    def step(self) -> Iterable[tuple[GenerationRequest, Outcome]]:
        """Move all requests on; returns those that are done."""
        ...

    def abort(self, requests: Iterable[GenerationRequest]) -> None:
        """Forget requests that are in the engine."""
        ...


class StepDriver:
    """Feeds a `StepEngine`. Its thread starts with the first use and sleeps when idle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._engine: StepEngine
        self._changed = threading.Condition()
        self._incoming: list[GenerationRequest] = []
        self._cancelled: list[GenerationRequest] = []
        self._errands: list[tuple[Callable[[], object], Future]] = []
        self._waiting: dict[GenerationRequest, asyncio.Future[Completion]] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def attach(self, engine: StepEngine) -> None:
        self._engine = engine

    async def submit(self, request: GenerationRequest) -> Completion:
        """Wait for one request. Cancelling the wait takes the request out of the engine.

        Raises:
            EngineError: the engine failed while it held the request, or is closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        with self._changed:
            if self._closed:
                raise EngineError("The engine is closed.")
            self._waiting[request] = future
            self._incoming.append(request)
        # Woken once all coroutines that are ready now have submitted: one batch, not one each.
        loop.call_soon(self._wake)
        try:
            return await future
        except asyncio.CancelledError:
            with self._changed:
                self._waiting.pop(request, None)
                self._cancelled.append(request)
                self._changed.notify()
            raise

    @property
    def is_open(self) -> bool:
        return not self._closed

    def call(self, function: Callable[[], T], *, even_if_busy: bool = False) -> T:
        """Run a function on the driver's thread while no request is in flight, and wait for it.

        Raises:
            EngineBusyError: requests are in flight.
        """
        errand: Future = Future()
        with self._changed:
            if self._closed:
                raise EngineError("The engine is closed.")
            if self._waiting and not even_if_busy:
                raise EngineBusyError(
                    f"{len(self._waiting)} requests are in flight. Wait for the rollout to end "
                    "before weights are updated."
                )
            self._errands.append((function, errand))
            self._start_thread()
            self._changed.notify()
        return errand.result()

    def close(self) -> None:
        """Stop the thread; whoever still waits gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._start_thread()
            self._changed.notify()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            self._thread.start()

    def _run(self) -> None:
        failure = EngineError("The engine is closed.")
        try:
            self._drive()
        except BaseException as error:
            failure = EngineError(f"The engine's thread ended: {type(error).__name__}: {error}")
            raise
        finally:  # nobody may wait for a thread that is gone
            with self._changed:
                self._closed = True
                errands = self._errands
            for _, errand in errands:
                errand.set_exception(failure)
            self._answer([(request, failure) for request in list(self._waiting)])

    def _drive(self) -> None:
        in_engine: set[GenerationRequest] = set()
        while True:
            with self._changed:
                while not (self._incoming or self._cancelled or self._errands or in_engine):
                    if self._closed:
                        return
                    self._changed.wait()
                if self._closed:
                    return
                incoming, self._incoming = self._incoming, []
                cancelled, self._cancelled = set(self._cancelled), []
                errands, self._errands = self._errands, []
            self._drop(cancelled & in_engine)
            in_engine -= cancelled
            while errands:  # what has run is let go: it may hold a learner
                _run_errand(*errands.pop(0))
            in_engine |= self._admit([r for r in incoming if r not in cancelled])
            if in_engine:
                in_engine -= self._step(in_engine)

    def _admit(self, requests: list[GenerationRequest]) -> set[GenerationRequest]:
        """Hand requests to the engine; one that it refuses fails alone."""
        admitted = set()
        for request in requests:
            try:
                self._engine.add(request)
                admitted.add(request)
            except Exception as error:
                self._answer([(request, _as_engine_error(error))])
        return admitted

    def _step(self, in_engine: set[GenerationRequest]) -> set[GenerationRequest]:
        """One step; returns the requests that left. A failing step fails all that were in it."""
        try:
            done = list(self._engine.step())
        except Exception as error:
            failure = _as_engine_error(error)
            done = [(request, failure) for request in in_engine]
            self._drop(in_engine)
        self._answer(done)
        return {request for request, _ in done}

    def _drop(self, requests: set[GenerationRequest]) -> None:
        if requests:
            self._engine.abort(requests)

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


def _run_errand(function: Callable[[], object], errand: Future) -> None:
    try:
        errand.set_result(function())
    except BaseException as error:  # handed to the caller's thread
        errand.set_exception(error)


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    wrapped = EngineError(f"The engine failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
