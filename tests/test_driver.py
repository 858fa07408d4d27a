"""The thread that steps an engine: every request is answered once, whatever the engine does."""

import asyncio
import threading

import pytest

from agent_vllm.engines.base import GenerationRequest
from agent_vllm.engines.driver import StepDriver
from agent_vllm.errors import EngineBusyError, EngineError
from agent_vllm.types import Completion


def request():
    return GenerationRequest(
        prompt_ids=[1], max_new_tokens=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=0
    )


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_ended(driven):
    engine, driver = driven
    engine.step = lambda: 1 / 0
    engine.abort = lambda requests: 1 / 0  # not to be survived
    outcomes = asyncio.run(submit_all(driver, 2))
    driver._thread.join(5)
    assert [type(outcome) for outcome in outcomes] == [EngineError] * 2
    assert "thread ended" in str(outcomes[0])
    with pytest.raises(EngineError, match="closed"):
        driver.call(lambda: None)


def test_an_errand_hands_its_error_to_the_caller(driven):
    with pytest.raises(ZeroDivisionError):
        driven[1].call(lambda: 1 / 0)
