"""A linear agent on the real engines: the ids that our own loop samples with the same seed."""

import pytest
from client_agents import forgiving, looping
from tiny_tasks import SMALL_KINDS, TOOLS, make_tasks

from agent_vllm import ChatFormat, Limits, TorchRolloutEngine, rollout_batch
from agent_vllm.gateway import rollout_agent


@pytest.fixture(params=["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request, agent):
    if request.param == "vllm":
        engine = request.getfixturevalue("vllm_engine")
        engine.update_policy(agent[0])  # other tests put weights of their own in
        yield engine
    else:
        with TorchRolloutEngine(*agent) as engine:
            yield engine


def test_a_linear_agent_samples_the_ids_of_our_own_loop(engine):
    rows = make_tasks("train", 6, kinds=SMALL_KINDS)
    chat = ChatFormat.from_tokenizer(engine.tokenizer)
    limits = Limits(max_turns=4, max_completion_tokens=120)
    prompts = [row["prompt"] for row in rows]
    own = rollout_batch(
        engine, chat, prompts, [TOOLS] * 6, num_generations=2, limits=limits, seed=3
    )
    agent = looping(TOOLS, run=[forgiving(tool) for tool in TOOLS])
    agents = rollout_agent(engine, chat, agent, rows, num_generations=2, limits=limits, seed=3)
    # a call that could not run is answered by each in its own words
    same = [i for i, t in enumerate(own) if all(r.status == "ok" for r in t.tool_results)]
    assert len({i for i in same if own[i].tool_results}) >= 2
    for i in same:
        assert agents[i].prompt_ids == own[i].prompt_ids
        assert agents[i].completion_ids == own[i].completion_ids
        assert agents[i].completion_mask == own[i].completion_mask
        assert agents[i].logprobs == pytest.approx(own[i].logprobs, abs=1e-4)
    assert all(t.branches == [] for t in agents)
