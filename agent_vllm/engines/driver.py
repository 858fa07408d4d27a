"""Step a batch engine on one thread while anyone waits for it.

Owns the thread that an engine is called on, and the watchdog of that engine; `mailbox` carries
requests to it. Invariant: every request is answered once, with a completion or an error, even if
the engine hangs.

An engine that fails one step continues without the requests that were in it. It is dead when steps
fail repeatedly, when it can't drop what a failed step left, or when it makes no progress for
`hang_s`. A thread inside native code can't be killed, so it is left behind. (Native code that also
holds the GIL stops the whole process; the watchdog can't see that.)
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

from agent_vllm.engines.gpu import use_gpu
from agent_vllm.engines.mailbox import Mailbox, Outcome, run_errand
from agent_vllm.engines.request import GenerationRequest
from agent_vllm.errors import EngineDeadError, EngineError
from agent_vllm.types import Completion

T = TypeVar("T")

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
        gpu: index of the thread's GPU.
    """

    def __init__(self, name: str, *, hang_s: float | None = None, gpu: int | None = None) -> None:
        if hang_s is not None and hang_s <= 0:
            raise ValueError(f"`hang_s` must be more than 0, got {hang_s}. Use None for no watch.")
        self._name = name
        self._hang_s = hang_s
        self._gpu = gpu
        self._engine: StepEngine
        self._is_attached = False
        self._mail = Mailbox(self._start_thread)
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
        return self._mail.death

    def note_progress(self) -> None:
        """Reset the watchdog; an engine calls this during a long step."""
        self._progress_at = time.monotonic()

    def _rest(self) -> None:
        self._progress_at = None

    async def submit(self, request: GenerationRequest) -> Completion:
        """Wait for one request, as `Mailbox.submit`."""
        return await self._mail.submit(request)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the driver's thread between requests, as `Mailbox.call`."""
        return self._mail.call(function)

    def close(self, finish: Callable[[], object] = lambda: None) -> None:
        """End the thread after it runs `finish`; requests that still wait get an error.

        A thread that hangs is not waited for. It runs `finish` if it ever returns.
        """
        done = self._mail.close(finish)
        if done is None:
            return
        if self._thread is not None:
            self._is_over.wait()
        if done.done():
            done.result()

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
                self._mail.die(f"The engine hangs: it has made no progress for {hang_s:g} s.")
                self._is_over.set()

    def _run(self) -> None:
        try:
            use_gpu(self._gpu)
            self._drive()
        except BaseException as error:
            _log.exception("The thread of the %s failed.", self._name)
            _free_memory_of(error)
            self._mail.die(f"The engine's thread failed: {type(error).__name__}: {error}")
        last = self._mail.take_last(rest=self._rest)
        self.note_progress()
        run_errand(last)
        self._is_over.set()

    def _drive(self) -> None:
        """Step the engine until it is dead or closed."""
        in_engine: set[GenerationRequest] = set()
        while work := self._mail.take(is_idle=not in_engine, rest=self._rest):
            self.note_progress()
            if gone := work.cancelled & in_engine:
                self._engine.abort(gone)
                in_engine -= gone
            while work.errands:  # drop each one after it ran: it may hold a learner
                errand = work.errands.pop(0)
                run_errand(errand)
                self._mail.forget(errand)
                self.note_progress()
                del errand
            in_engine |= self._admit(work.incoming)
            if in_engine:
                in_engine -= self._step(in_engine)

    def _admit(self, requests: list[GenerationRequest]) -> set[GenerationRequest]:
        """Add requests to the engine; one that it refuses fails alone."""
        admitted = set()
        for request in requests:
            try:
                self._engine.add(request)
                admitted.add(request)
            except Exception as error:
                self._mail.answer([(request, _as_engine_error(error))])
        return admitted

    def _step(self, in_engine: set[GenerationRequest]) -> set[GenerationRequest]:
        """Run one step; return the requests that left. If it fails, all requests in it fail."""
        try:
            done = list(self._engine.step())
            self._num_failed_steps = 0
        except Exception as error:
            done = self._give_up(in_engine, error)
        self._mail.answer(done)
        return {request for request, _ in done}

    def _give_up(
        self, in_engine: set[GenerationRequest], error: Exception
    ) -> list[tuple[GenerationRequest, Outcome]]:
        """Drop a failed step's requests from the engine."""
        failure = _as_engine_error(error)
        _log.warning("A step with %d requests failed: %s", len(in_engine), failure)
        self._num_failed_steps += 1
        self._engine.abort(in_engine)
        _free_memory_of(error)
        if isinstance(error, EngineDeadError):
            self._mail.die(str(error))
        elif self._num_failed_steps == _MAX_FAILED_STEPS:
            self._mail.die(f"{_MAX_FAILED_STEPS} steps in a row failed, the last one: {failure}")
        return [(request, failure) for request in in_engine]


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
