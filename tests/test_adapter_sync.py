"""A PEFT learner's weights in the engines: the adapter alone, or merged into copies."""

import asyncio

import pytest
import torch
from adapted import LINEAR, adapted

from agent_vllm import TorchRolloutEngine, VLLMRolloutEngine
from agent_vllm.engines.vllm_process import VLLMStepper
from agent_vllm.errors import WeightSyncError
from agent_vllm.logprobs import predicted_logprobs

TOLERANCE = 1e-5


def gap(engine, model, prompts=((20, 30, 40), (50,), tuple(range(60, 100)))):
    """Largest distance of a sampled logprob from a plain forward of the learner."""
    gaps = []
    for prompt in map(list, prompts):
        sampled = asyncio.run(engine.generate(prompt, max_new_tokens=12, seed=1))
        ids = torch.tensor([prompt + sampled.token_ids])
        with torch.no_grad():
            logprobs = predicted_logprobs(model.eval()(input_ids=ids).logits, ids)
        gaps.append(logprobs[0, len(prompt) - 1 :] - torch.tensor(sampled.logprobs))
    return max(difference.abs().max().item() for difference in gaps)


def train_a_step(model, lr=1e-2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    ids = torch.randint(10, 300, (2, 16), generator=torch.manual_seed(0))
    model.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad()


@pytest.mark.vllm
def test_d07_vllm_follows_an_adapter_that_is_sent_by_itself(agent):
    """Ranks and scalings of layers differ; each version is served, never an older one."""
    model = adapted(agent[0], rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3})
    base_bytes = sum(p.nbytes for p in agent[0].parameters() if not p.requires_grad)
    with VLLMRolloutEngine(model, agent[1]) as engine:
        assert engine.num_synced_bytes > base_bytes  # once
        gaps = [gap(engine, model)]
        for step in range(3):
            train_a_step(model)
            engine.update_policy(model)
            gaps.append(gap(engine, model))
            assert engine.num_synced_bytes == sum(
                p.nbytes for p in model.parameters() if p.requires_grad
            )
        assert max(gaps) <= TOLERANCE, gaps
        train_a_step(model)
        assert gap(engine, model) > 100 * TOLERANCE  # the check can fail


@pytest.mark.vllm
def test_d07_vllm_follows_merged_weights_when_told_to(agent):
    model = adapted(agent[0])
    with VLLMRolloutEngine(model, agent[1], adapter_sync="merged") as engine:
        first = gap(engine, model)
        train_a_step(model)
        engine.update_policy(model)
        assert max(first, gap(engine, model)) <= TOLERANCE
