"""vLLM's asynchronous scheduling, its default on CUDA: the next step is queued before one is read.

vLLM switches it off on a CPU. It is switched on here, so that the driver meets a batch that is
still in the queue when a request ends or is aborted, and when weights are synced.
"""

import asyncio

import pytest
import torch
from agreement import TOLERANCE, distance, gap
from agreement import sample as sample_trajectories

from agent_vllm import VLLMRolloutEngine

pytestmark = pytest.mark.vllm


@pytest.fixture
def asynchronous(agent, monkeypatch):
    """An engine with two batches in its queue, and its learner."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(
        CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)
    )
    model, tokenizer = agent
    with VLLMRolloutEngine(model, tokenizer) as engine:
        core = engine._stepper._llm.engine_core.engine_core
        assert type(core.scheduler).__name__ == "AsyncScheduler"
        assert core.batch_queue_size == 2
        yield engine, model


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)


def test_turns_have_the_learners_logprobs_before_and_after_a_sync(asynchronous):
    engine, model = asynchronous
    for _ in range(2):
        trajectories = sample_trajectories(engine, engine.tokenizer, temperature=1.0)
        assert max(t.num_turns for t in trajectories) > 1
        assert distance(model, trajectories, temperature=1.0) <= TOLERANCE
        change(model)
        engine.update_policy(model)


def test_aborted_requests_leave_nothing_behind(asynchronous):
    engine, model = asynchronous

    async def half_aborted():
        tasks = [
            asyncio.create_task(engine.generate([5, 6, 7], max_new_tokens=200, seed=seed))
            for seed in range(8)
        ]
        await asyncio.sleep(0.05)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(half_aborted())
    assert sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes) >= 1
    change(model)
    engine.update_policy(model)  # raises if blocks are still held
    assert gap(engine, model) <= TOLERANCE
