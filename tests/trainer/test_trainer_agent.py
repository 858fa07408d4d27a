"""Train agents with a loop of their own: the same tokens as our loop, and honest books."""

import pytest
import trainers
from client_agents import ask, forgiving, looping
from fakes import user
from tiny_tasks import calculator, correct_reward
from trainers import REWARDS, TOOLS

from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.types import StopReason


async def tiny(row, client):
    """Loop with the tiny agent's tools; described by their own schemas."""
    return await looping(TOOLS, run=[forgiving(tool) for tool in TOOLS])(row, client)


def rolled_out(trainer):
    """The first rollout of a run, and what was logged of it."""
    trainer.train()
    [log] = [log for log in trainer.state.log_history if "rollout/sampled_tokens" in log]
    return trainer.trajectories, log


def test_an_agent_is_trained_on_the_tokens_of_our_own_loop(new_trainer):
    settings = {"reward_funcs": REWARDS, "max_steps": 1, "max_turns": 4, "learning_rate": 0.0}
    own, own_log = rolled_out(new_trainer(tools=TOOLS, **settings))
    agents, log = rolled_out(new_trainer(agent=tiny, **settings))
    same = [i for i, t in enumerate(own) if all(r.status == "ok" for r in t.tool_results)]
    assert len(same) >= 4
    assert any(own[i].tool_results for i in same)
    for i in same:
        assert agents[i].prompt_ids == own[i].prompt_ids
        assert agents[i].completion_ids == own[i].completion_ids
        assert agents[i].completion_mask == own[i].completion_mask
        assert agents[i].logprobs == pytest.approx(own[i].logprobs, abs=1e-4)
        assert agents[i].completion_messages == own[i].completion_messages
    assert log["rollout/forked_tokens"] == own_log["rollout/forked_tokens"] == 0
    assert log["rollout/trained_tokens"] == log["rollout/sampled_tokens"] > 0
    assert log["sampling/logprob_gap/max"] < trainers.GAP


def test_what_an_agent_returns_reaches_reward_functions(new_trainer, agent):
    seen = []

    def reward(agent_output, stop_reason, **columns):
        seen.extend(zip(agent_output, stop_reason, strict=True))
        return [float(len(output)) for output in agent_output]

    engine = ScriptedRolloutEngine(agent[1], ["yes"])
    trainer = new_trainer(engine, agent=looping([]), reward_funcs=reward, max_steps=1)
    rolled_out(trainer)
    assert seen == [("yes", "answered")] * 8


def test_what_an_agent_left_behind_is_counted_as_forked(new_trainer, agent):
    async def twice(row, client):
        await ask(client, user("draft"))
        await ask(client, row["prompt"])

    engine = ScriptedRolloutEngine(agent[1], ["yes"])
    trainer = new_trainer(engine, agent=twice, reward_funcs=correct_reward, max_steps=1)
    trajectories, log = rolled_out(trainer)
    num_tokens = len(engine.encode_turn("yes"))
    assert [len(t.branches) for t in trajectories] == [1] * 8
    counts = {name: log[f"rollout/{name}_tokens"] for name in ("sampled", "trained", "forked")}
    assert counts == {
        "sampled": 16 * num_tokens,
        "trained": 8 * num_tokens,
        "forked": 8 * num_tokens,
    }


def test_an_agent_that_raises_is_not_trained_and_its_tokens_are_counted(new_trainer, agent):
    num_runs = 0

    async def flaky(row, client):
        nonlocal num_runs
        num_runs += 1
        is_bad = num_runs == 1
        await ask(client, row["prompt"])
        if is_bad:
            raise RuntimeError("bad luck")

    engine = ScriptedRolloutEngine(agent[1], ["yes"])
    trainer = new_trainer(engine, agent=flaky, reward_funcs=correct_reward, max_steps=1)
    trajectories, log = rolled_out(trainer)
    reasons = sorted(t.stop_reason for t in trajectories)
    assert reasons == [StopReason.AGENT_ERROR, *[StopReason.ANSWERED] * 7]
    num_tokens = len(engine.encode_turn("yes"))
    assert log["rollout/failed_tokens"] == num_tokens
    assert log["rollout/trained_tokens"] == 7 * num_tokens


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"tools": [calculator]}, "`tools` must be left out with an `agent`"),
        ({"user": lambda row: None}, "`user` must be left out with an `agent`"),
        ({"tool_timeout_s": 3.0}, "`tool_timeout_s` must be left out with an agent, got 3.0"),
        ({"max_invalid_calls": 3}, "`max_invalid_calls` must be left out with an agent, got 3"),
        ({"train_dataset": trainers.rows(8).map(lambda row: {"prompt": "text"})}, "conversational"),
    ],
)
def test_what_an_agent_would_leave_without_effect_is_refused(new_trainer, agent, changes, error):
    engine = ScriptedRolloutEngine(agent[1], ["yes"])
    with pytest.raises(ValueError, match=error):
        new_trainer(engine, agent=tiny, reward_funcs=correct_reward, **changes)
