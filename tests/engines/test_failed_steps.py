"""A step of vLLM that fails once: nothing is sampled from keys and values it never computed."""

import asyncio

import pytest
import torch
from agreement import TOLERANCE

from agent_vllm import VLLMRolloutEngine
from agent_vllm.errors import EngineDeadError, EngineError
from agent_vllm.training import predicted_logprobs

pytestmark = pytest.mark.vllm

BLOCK = 32  # tokens; full blocks are cached
PROMPT = [20 + (7 * index) % 60 for index in range(2 * BLOCK - 2)]  # two tokens fill a block


class FailsOnce:
    """`execute_model` that raises in one call, before or after it did its work."""

    def __init__(self, execute_model, failing_call, *, after):
        self.execute_model, self.failing_call, self.after = execute_model, failing_call, after
        self.num_calls = 0

    def __call__(self, *args, **kwargs):
        self.num_calls += 1
        if self.num_calls != self.failing_call:
            return self.execute_model(*args, **kwargs)
        if self.after:
            self.execute_model(*args, **kwargs)
        raise torch.OutOfMemoryError("no room")


def model_runner(engine):
    return engine._stepper._llm.model_executor.driver_worker.model_runner


def fail_once(monkeypatch, engine, failing_call, *, after=False):
    runner = model_runner(engine)
    wrapped = FailsOnce(runner.execute_model, failing_call, after=after)
    monkeypatch.setattr(runner, "execute_model", wrapped)
    return wrapped


def sample(engine, prompts, num_tokens=12):
    async def sample_all():
        requests = [
            engine.generate(prompt, max_new_tokens=num_tokens, seed=seed)
            for seed, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*requests, return_exceptions=True)

    return asyncio.run(sample_all())


def gap(model, prompts, completions):
    """Largest distance of a sampled logprob from a plain forward of the learner."""
    gaps = []
    for prompt, sampled in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + sampled.token_ids])
        with torch.no_grad():
            learner = predicted_logprobs(model.eval()(input_ids=ids).logits, ids)
        gaps.append((learner[0, len(prompt) - 1 :] - torch.tensor(sampled.logprobs)).abs().max())
    return max(gaps).item()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("failing_call", [1, 2, 3], ids=["prefill", "decode", "decode-fills-block"])
def test_after_a_failed_step_logprobs_are_the_learners(
    agent, vllm_engine, monkeypatch, failing_call, after
):
    model, _ = agent
    vllm_engine.update_policy(model)
    prompts = [PROMPT, PROMPT, [9, *PROMPT], PROMPT * 3]
    failing = fail_once(monkeypatch, vllm_engine, failing_call, after=after)
    failed = sample(vllm_engine, prompts)
    assert [type(outcome) for outcome in failed] == [EngineError] * 4
    assert failing.num_calls == failing_call

    retried = sample(vllm_engine, prompts)
    assert gap(model, prompts, retried) <= TOLERANCE
    before = vllm_engine.stats()
    longer = [p + c.token_ids + [30, 40] for p, c in zip(prompts, retried, strict=True)]
    assert gap(model, longer, sample(vllm_engine, longer)) <= TOLERANCE
    assert vllm_engine.stats().since(before).num_cached_tokens >= 4 * BLOCK


def test_the_self_check_leaves_nothing_behind_when_its_step_fails(agent, vllm_engine, monkeypatch):
    model, _ = agent
    monkeypatch.setattr(vllm_engine, "_is_checked", False)
    with monkeypatch.context() as patch:
        fail_once(patch, vllm_engine, 2)
        with pytest.raises(torch.OutOfMemoryError):
            vllm_engine.update_policy(model)
    vllm_engine.update_policy(model)
    assert gap(model, [PROMPT], sample(vllm_engine, [PROMPT])) <= TOLERANCE


def test_an_engine_that_cannot_drop_a_failed_step_is_dead(agent, monkeypatch):
    model, tokenizer = agent
    with VLLMRolloutEngine(model, tokenizer, max_model_len=256) as engine:
        fail_once(monkeypatch, engine, 1)
        monkeypatch.setattr(engine._stepper._llm, "reset_prefix_cache", lambda: False)
        outcomes = [sample(engine, [PROMPT])[0] for _ in range(2)]
        assert [type(outcome) for outcome in outcomes] == [EngineDeadError] * 2
        assert "OutOfMemoryError: no room" in engine.death
        assert "refused to reset its prefix cache" in engine.death


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU vLLM has no batch queue")
def test_with_async_scheduling_steps_behind_a_failed_one_are_dropped_too(agent, monkeypatch):
    model, tokenizer = agent
    with VLLMRolloutEngine(model.cuda(), tokenizer, max_model_len=512) as engine:
        for failing_call in (1, 3):
            with monkeypatch.context() as patch:
                fail_once(patch, engine, failing_call)
                assert type(sample(engine, [PROMPT])[0]) is EngineError
            assert gap(model.cpu(), [PROMPT], sample(engine, [PROMPT])) <= 1e-3
            model.cuda()
