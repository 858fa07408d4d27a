"""Sleep and wake around the learner's step: the order of calls, on a stand-in that minds it."""

import asyncio
import types

import pytest
import torch
from accelerate import Accelerator
from learners import learner
from vllm_stand_in import StandIn

from agent_vllm import VLLMRolloutEngine
from agent_vllm.engines.vllm import cpu, stepper
from agent_vllm.engines.vllm import engine as vllm_engine
from agent_vllm.errors import EngineBusyError, EngineError
from trl_integration.engine_life import EngineLife

pytestmark = pytest.mark.vllm


@pytest.fixture
def sleeper(tokenizer, monkeypatch):
    """An engine over the stand-in, with its learner."""
    monkeypatch.setattr(vllm_engine, "check_sleep_mode", lambda: None)
    monkeypatch.setattr(cpu, "is_cpu", lambda: False)
    monkeypatch.setattr(stepper, "_build", lambda source, options: StandIn())
    monkeypatch.setattr(vllm_engine, "check_against_learner", lambda *_, **__: None)
    model = learner()
    with VLLMRolloutEngine(model, tokenizer, sleep_mode=True) as engine:
        llm = engine._stepper._llm
        llm.calls.clear()
        yield engine, model, llm


def sample(engine):
    return asyncio.run(engine.generate([5, 6], max_new_tokens=1, seed=0))


RELOAD = ["load", "reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache"]


def test_waking_up_has_one_safe_order(sleeper):
    engine, model, llm = sleeper
    sample(engine)
    engine.sleep()
    engine.update_policy(model)
    sample(engine)
    assert llm.calls == [
        "generate", "sleep 2", "wake weights", *RELOAD, "wake kv_cache", "generate",
    ]  # fmt: skip


def test_a_sleeping_engine_samples_nothing_and_says_how_to_wake_it(sleeper):
    engine, model, llm = sleeper
    engine.sleep()
    with pytest.raises(EngineError, match=r"asleep.*learner's weights"):
        sample(engine)
    assert "generate" not in llm.calls
    engine.update_policy(model)
    assert sample(engine).token_ids == [7]


def test_an_engine_with_requests_in_flight_is_not_put_to_sleep(sleeper):
    engine, _, llm = sleeper

    async def in_flight():
        task = asyncio.create_task(engine.generate([5], max_new_tokens=1, seed=0))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusyError):
            engine.sleep()
        await task

    asyncio.run(in_flight())
    assert "sleep 2" not in llm.calls


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["sleep", "load"], "asleep"),
        (["sleep", "wake kv", "load"], "asleep"),
        (["sleep", "wake all", "generate"], "lost"),
        (["sleep", "wake weights", "load", "generate"], "asleep"),
        (["load", "generate"], "old weights"),
    ],
)
def test_the_stand_in_notices_a_wrong_order(calls, message):
    llm = StandIn()
    do = {
        "sleep": lambda: llm.sleep(level=2),
        "wake weights": lambda: llm.wake_up(tags=["weights"]),
        "wake kv": lambda: llm.wake_up(tags=["kv_cache"]),
        "wake all": lambda: llm.wake_up(),
        "load": lambda: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(())}),
        "generate": llm.step,
    }
    with pytest.raises(RuntimeError, match=message):
        for call in calls:
            do[call]()


@pytest.fixture
def life(sleeper):
    """What the trainer does with the stand-in."""
    engine, model, _ = sleeper
    return EngineLife(
        engine,
        args=types.SimpleNamespace(vllm_enable_sleep_mode=True, sync_weights="after_step"),
        accelerator=Accelerator(cpu=True),
        tokenizer=engine.tokenizer,
        learner=lambda: model,
        save_state=lambda: None,
        check_learner=lambda: None,
    )


def test_the_trainer_lets_the_engine_sleep_between_rollouts(sleeper, life):
    """After a rollout it sleeps; an optimizer step only counts; the next rollout wakes it."""
    engine, model, llm = sleeper
    assert llm.calls == ["sleep 2"]  # while the learner first allocates
    life.ensure_current()
    sample(engine)
    version = engine.policy_version
    life.rollout_done()
    life.after_step()
    assert engine.policy_version == version + 1  # what was sampled is one step old
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    life.after_step()
    assert llm.calls[-1] == "sleep 2"
    assert life.ensure_current()["rollout/sync_bytes"] > 0
    assert torch.equal(llm.weights["model.norm.weight"], model.model.norm.weight)
    assert sample(engine).policy_version == engine.policy_version == version + 2


def test_a_sync_that_is_asked_for_wakes_the_engine(sleeper, life):
    """As before an evaluation by hand after training; asleep, it would sample nothing."""
    engine, model, llm = sleeper
    life.ensure_current()
    life.rollout_done()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    life.sync()
    assert sample(engine).token_ids == [7]
    assert torch.equal(llm.weights["model.norm.weight"], model.model.norm.weight)


def test_a_rank_whose_engine_died_does_not_sync_alone(sleeper, life):
    """A dead engine is not put to sleep, and the others' ranks take part in no sync."""
    life.ensure_current()
    life._verdict = "it hangs"
    life.rollout_done()
    life._accelerator = None  # a gather that the other ranks don't make would hang
    assert life.after_step() == {}


def test_on_a_cpu_sleep_is_refused_before_anything_is_built(agent):
    with pytest.raises(ValueError, match="sleep mode is not supported on this platform"):
        VLLMRolloutEngine(*agent, sleep_mode=True)


@pytest.mark.gpu
def test_sleep_gives_gpu_memory_back_and_waking_is_exact(agent):
    """Needs a GPU: memory falls while asleep, and the learner's weights are there afterwards."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from agreement import gap

    model, tokenizer = agent
    with VLLMRolloutEngine(model.cuda(), tokenizer, sleep_mode=True) as engine:
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > awake
        engine.update_policy(model)
        assert gap(engine, model) <= 1e-3
