"""Numerics by links: engine == a plain forward of the learner, over multi-turn trajectories.

Float32, three temperatures, both engines (vLLM also with its weights packed, as those of larger
models are on a CPU), the prefix cache on, at the start and after each of five
optimizer steps with their syncs. The largest distance is printed.
"""

import pytest
import torch
from agreement import TOLERANCE, distance, sample
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_vllm import (
    TorchRolloutEngine,
    VLLMRolloutEngine,
    collate,
)
from agent_vllm.engines.vllm import cpu

NUM_STEPS = 5


@pytest.fixture(scope="module")
def packed_engine(agent_path):
    tokenizer = AutoTokenizer.from_pretrained(agent_path)
    model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "UNPACKED_LIMIT", 0)
        engine = VLLMRolloutEngine(model, tokenizer)
    with engine:
        yield engine


@pytest.fixture(
    params=[
        "torch",
        pytest.param("vllm_engine", marks=pytest.mark.vllm),
        pytest.param("packed_engine", marks=pytest.mark.vllm),
    ]
)
def engine(request, agent):
    if request.param == "torch":
        with TorchRolloutEngine(*agent) as engine:
            yield engine
    else:
        yield request.getfixturevalue(request.param)


@pytest.mark.vllm
def test_the_packed_engine_is_one(vllm_engine, packed_engine):
    kinds = [cpu.is_unpacked(engine._stepper._llm) for engine in (vllm_engine, packed_engine)]
    assert kinds == [True, False]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_engine_and_learner_agree_at_start_and_after_every_step(
    engine, agent, temperature, capsys, request
):
    model, tokenizer = agent
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    distances, first_ids = [], []
    for step in range(NUM_STEPS + 1):
        version = engine.update_policy(model)
        trajectories = sample(engine, tokenizer, temperature, num_rows=6)
        assert {v for t in trajectories for v in t.policy_versions} == {version}
        assert any(t.num_turns > 1 for t in trajectories)
        distances.append(distance(model, trajectories, temperature))
        first_ids.append([t.completion_ids for t in trajectories])
        if step < NUM_STEPS:
            batch = collate(trajectories, pad_token_id=0)
            model.train()(batch.input_ids, labels=batch.input_ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with capsys.disabled():
        name = request.node.callspec.params["engine"]
        print(f"\n  {name}, T={temperature}: max |engine - learner| = {max(distances):.2e}")
    assert max(distances) <= TOLERANCE, distances
    assert first_ids[0] != first_ids[-1]  # it did move


def test_the_distance_notices_an_engine_that_was_not_synced(engine, agent):
    model, tokenizer = agent
    if isinstance(engine, TorchRolloutEngine):
        pytest.skip("the torch engine shares the learner's module")
    engine.update_policy(model)
    with torch.no_grad():
        model.lm_head.weight.add_(0.01 * torch.randn(model.lm_head.weight.shape))
    assert distance(model, sample(engine, tokenizer, 1.0), 1.0) > 100 * TOLERANCE


@pytest.mark.vllm
def test_both_engines_sample_the_same_trajectories(vllm_engine, agent):
    """The same seeds drive the same draws: the torch engine is a reference token by token."""
    model, tokenizer = agent
    vllm_engine.update_policy(model)
    with TorchRolloutEngine(model, tokenizer) as reference:
        ours, theirs = sample(reference, tokenizer, 1.0), sample(vllm_engine, tokenizer, 1.0)
    assert [t.completion_ids for t in ours] == [t.completion_ids for t in theirs]
