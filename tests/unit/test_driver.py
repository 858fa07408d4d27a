"""The thread that steps an engine: every request is answered once, whatever the engine does."""

import asyncio
import threading
import time

import pytest
import torch

from agent_vllm.engines import driver as driver_module
from agent_vllm.engines.base import GenerationRequest
from agent_vllm.engines.driver import StepDriver
from agent_vllm.errors import EngineBusyError, EngineDeadError, EngineError
from agent_vllm.types import Completion


def request():
    return GenerationRequest(prompt_ids=[1], max_new_tokens=1, seed=0)


def completion():
    return Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", policy_version=0)


class Engine:
    """Notes what it is told; finishes everything at each step unless it is held."""

    def __init__(self):
        self.events, self.inside = [], []
        self.go_on = threading.Event()
        self.go_on.set()

    def add(self, request):
        self.events.append("add")
        self.inside.append(request)

    def step(self):
        self.go_on.wait(5)
        self.events.append(f"step {len(self.inside)}")
        done, self.inside = self.inside, []
        return [(request, completion()) for request in done]

    def abort(self, requests):
        self.events.append(f"abort {len(set(requests))}")
        self.inside = [r for r in self.inside if r not in set(requests)]


@pytest.fixture
def driven():
    engine, driver = Engine(), StepDriver("test")
    driver.attach(engine)
    yield engine, driver
    engine.go_on.set()
    driver.close()


async def submit_all(driver, num):
    return await asyncio.gather(
        *(driver.submit(request()) for _ in range(num)), return_exceptions=True
    )


def test_coroutines_that_are_ready_together_make_one_batch(driven):
    engine, driver = driven
    assert len(asyncio.run(submit_all(driver, 5))) == 5
    assert engine.events == ["add"] * 5 + ["step 5"]


def test_two_event_loops_share_one_engine(driven):
    _, driver = driven
    threads = [threading.Thread(target=asyncio.run, args=(submit_all(driver, 3),)) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_a_request_that_the_engine_refuses_fails_alone(driven):
    engine, driver = driven
    engine.add = lambda r, add=engine.add: add(r) if len(engine.inside) < 2 else 1 / 0
    outcomes = asyncio.run(submit_all(driver, 3))
    assert [type(outcome) for outcome in outcomes] == [Completion, Completion, EngineError]
    assert "ZeroDivisionError" in str(outcomes[2])


def test_a_cancelled_wait_takes_its_request_out(driven):
    engine, driver = driven
    engine.go_on.clear()

    async def cancel():
        task = asyncio.create_task(driver.submit(request()))
        while "add" not in engine.events:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineBusyError):
            driver.call(lambda: None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.go_on.set()
        return driver.call(lambda: "idle")

    assert asyncio.run(cancel()) == "idle"


def outcomes_of(driver, num=1):
    return [(type(o), str(o)) for o in asyncio.run(submit_all(driver, num))]


def test_a_failed_step_fails_what_was_in_it_and_the_engine_goes_on(driven):
    engine, driver = driven
    step, engine.step = engine.step, lambda: 1 / 0
    failed = (EngineError, "The engine failed: ZeroDivisionError: division by zero")
    assert outcomes_of(driver, 2) == [failed] * 2
    engine.step = step
    assert [kind for kind, _ in outcomes_of(driver, 2)] == [Completion] * 2
    assert engine.events == ["add", "add", "abort 2", "add", "add", "step 2"]
    assert driver.death is None


def test_steps_that_fail_again_and_again_are_a_dead_engine(driven):
    engine, driver = driven

    def out_of_memory():
        raise torch.OutOfMemoryError("no room")

    engine.step = out_of_memory
    failure = "The engine failed: OutOfMemoryError: no room"
    death = f"5 steps in a row failed, the last one: {failure}"
    assert [outcomes_of(driver)[0] for _ in range(6)] == [
        *[(EngineError, failure)] * 4,
        *[(EngineDeadError, death)] * 2,
    ]
    assert driver.death == death
    with pytest.raises(EngineDeadError, match="in a row failed"):
        driver.call(lambda: None)
    driver.close(lambda: engine.events.append("freed"))
    assert engine.events[-2:] == ["abort 1", "freed"]


def test_a_good_step_in_between_clears_the_count(driven):
    engine, driver = driven
    good = engine.step
    for _ in range(3):
        engine.step = lambda: 1 / 0
        assert [outcomes_of(driver)[0][0] for _ in range(4)] == [EngineError] * 4
        engine.step = good
        assert outcomes_of(driver)[0][0] is Completion


def test_nobody_waits_for_a_thread_that_failed(driven, caplog):
    engine, driver = driven
    engine.step = lambda: 1 / 0
    engine.abort = lambda requests: [][1]  # not to be survived
    death = "The engine's thread failed: IndexError: list index out of range"
    assert outcomes_of(driver, 2) == [(EngineDeadError, death)] * 2
    assert outcomes_of(driver) == [(EngineDeadError, death)]
    assert "in abort" not in caplog.text and "IndexError" in caplog.text
    driver.close(lambda: engine.events.append("freed"))
    assert engine.events[-1] == "freed"
    assert not driver._thread.is_alive()


@pytest.fixture
def hanging():
    """An engine whose steps come back when they are told to, watched closely."""
    engine, driver = Engine(), StepDriver("test", hang_s=0.5)
    driver.attach(engine)
    yield engine, driver
    engine.go_on.set()


HANGS = "The engine hangs: it has made no progress for 0.5 s."


def test_a_hanging_step_is_answered_and_left_behind(hanging):
    engine, driver = hanging
    engine.go_on.clear()
    assert outcomes_of(driver, 2) == [(EngineDeadError, HANGS)] * 2
    assert outcomes_of(driver) == [(EngineDeadError, HANGS)]
    assert driver.death == HANGS
    driver.close(lambda: engine.events.append("freed"))
    driver.close()
    assert driver._thread.is_alive()  # nobody waited for it
    assert engine.events == ["add", "add"]
    engine.go_on.set()
    driver._thread.join(5)
    assert engine.events == ["add", "add", "step 2", "freed"]


def test_a_hanging_errand_is_answered(hanging):
    engine, driver = hanging
    engine.go_on.clear()
    with pytest.raises(EngineDeadError, match="The engine hangs"):
        driver.call(lambda: engine.go_on.wait(5))
    assert driver.death == HANGS


def test_a_hang_is_found_while_closing(hanging):
    engine, driver = hanging
    engine.go_on.clear()
    driver.call(lambda: None)
    driver.close(lambda: engine.go_on.wait(5))
    assert driver._thread.is_alive()  # nobody waited for it


class Clock:
    """Time that passes when it is told to."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s

    def pass_by(self, seconds):
        self.now_s += seconds
        time.sleep(0.02)  # for the watchdog to have a look


def test_long_steps_that_make_progress_and_idle_time_are_no_hang(monkeypatch):
    engine, driver, clock = Engine(), StepDriver("test", hang_s=0.02), Clock()
    driver.attach(engine)
    monkeypatch.setattr(driver_module, "time", clock)
    step = engine.step

    def slow_step():
        for _ in range(20):
            clock.pass_by(0.015)
            driver.note_progress()
        return step()

    engine.step = slow_step
    assert outcomes_of(driver)[0][0] is Completion
    clock.pass_by(100)
    assert outcomes_of(driver)[0][0] is Completion
    driver.close()


def test_a_step_without_progress_is_a_hang(monkeypatch):
    engine, driver, clock = Engine(), StepDriver("test", hang_s=0.02), Clock()
    driver.attach(engine)
    monkeypatch.setattr(driver_module, "time", clock)
    engine.step = lambda: clock.pass_by(0.03) or (engine.go_on.wait(5) and [])
    engine.go_on.clear()
    assert outcomes_of(driver)[0][0] is EngineDeadError
    engine.go_on.set()


def test_the_building_of_an_engine_is_not_watched():
    driver = StepDriver("test", hang_s=0.5)
    driver.call(lambda: time.sleep(0.8))
    driver.attach(Engine())
    assert outcomes_of(driver)[0][0] is Completion
    driver.close()


@pytest.mark.parametrize("hang_s", [0, -1.0])
def test_a_watch_of_no_time_is_refused(hang_s):
    with pytest.raises(ValueError, match=f"`hang_s` must be more than 0, got {hang_s}"):
        StepDriver("test", hang_s=hang_s)


def test_a_closed_engine_says_so(driven):
    driver = driven[1]
    driver.close()
    assert outcomes_of(driver) == [(EngineDeadError, "The engine is closed.")]
    with pytest.raises(EngineDeadError, match="closed"):
        driver.call(lambda: None)


def test_what_the_last_errand_raises_reaches_who_closes(driven):
    driven[1].call(lambda: None)
    with pytest.raises(ZeroDivisionError):
        driven[1].close(lambda: 1 / 0)


def test_an_errand_hands_its_error_to_the_caller(driven):
    with pytest.raises(ZeroDivisionError):
        driven[1].call(lambda: 1 / 0)
