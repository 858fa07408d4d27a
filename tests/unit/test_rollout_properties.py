"""Seeded random conversations against every invariant, and the checker's own tests."""

import random
from types import SimpleNamespace

from fakes import (
    ADD,
    END,
    add,
    broken_invariants,
    call,
    difference,
    observed,
    sampled,
    shout,
    trajectory,
    user,
)

from agent_vllm.errors import EngineError
from agent_vllm.rollout import rollout_single
from agent_vllm.settings import Limits
from agent_vllm.types import StopReason

# ---- random conversations ----

_PARTS = (
    ADD,
    ADD + ADD,
    call("shout", text="汉é"),
    call("nope", x=1),
    call("add", a="1"),
    "<tool_call>{oops</tool_call>",
    "<tool_call>",
    "<think>hm " + ADD + "</think>",
    "plain words ",
    "",
)


def _random_rollout(chat, scripted, seed):
    rng = random.Random(seed)
    lost = []

    def script(request):
        turn = "".join(
            rng.choices(_PARTS, weights=[4, 2, 4, 2, 2, 1, 1, 1, 2, 1], k=rng.choice([1, 1, 2]))
        )
        ids = engine.encode_turn(turn)
        is_again = bool(lost) and lost[-1].prompt_ids == request.prompt_ids
        if rng.random() < (0.5 if is_again else 0.1):
            lost.append(request)
            return EngineError("lost")
        return ids[: rng.randrange(1, len(ids) + 1)] if rng.random() < 0.1 else ids

    max_new_tokens = rng.choice([None, 40, 80, 200])
    budgets = [num for num in (60, 200, 700) if num >= (max_new_tokens or 0)]
    limits = Limits(
        max_turns=rng.randrange(8),
        max_new_tokens=max_new_tokens,
        max_completion_tokens=rng.choice([None, *budgets]),
        max_tool_rounds=rng.choice([None, 2]),
        max_invalid_calls=rng.choice([None, 2]),
        max_tool_result_tokens=rng.choice([None, 30]),
    )
    engine = scripted(script, max_model_len=rng.choice([650, 900, 2000]))

    def next_message(messages):
        if rng.random() < 0.3:
            raise ValueError("gone")
        return None if rng.random() < 0.5 else "y" * rng.randrange(40)

    t = rollout_single(
        engine,
        chat,
        user("x" * rng.randrange(60)),
        [add, shout],
        user=rng.choice([None, next_message]),
        limits=limits,
        thinking_ratio=0.5,
        seed=seed,
    )
    answered = [request for request in engine.requests if request not in lost]
    return t, engine, limits, answered


def test_random_conversations_keep_every_invariant(chat, scripted):
    reasons = set()
    for seed in range(200):
        t, engine, limits, answered = _random_rollout(chat, scripted, seed)
        assert broken_invariants(t, answered) == [], seed
        assert len(t.prompt_ids + t.completion_ids) <= engine.max_model_len, seed
        assert len(t.completion_ids) <= (limits.max_completion_tokens or engine.max_model_len), seed
        assert t.num_turns <= limits.max_turns, seed
        reasons.add(t.stop_reason)
    elsewhere = {
        StopReason.AGENT_ERROR,
        StopReason.DEADLINE,
        StopReason.ENVIRONMENT_DONE,
        StopReason.ENVIRONMENT_ERROR,
    }
    assert reasons == set(StopReason) - elsewhere


def asking(prompts):
    return [SimpleNamespace(prompt_ids=prompt_ids) for prompt_ids in prompts]


def test_the_checker_finds_what_is_broken():
    t = trajectory([1, 2], sampled(3, END), observed(4), sampled(5, END))
    asked = [[1, 2], [1, 2, 3, END, 4]]
    assert broken_invariants(t, asking(asked)) == []
    assert broken_invariants(t, asking([[1, 2], [1, 2, 3, 4]])) == [
        "turn 1 was asked with other ids, index 3: got [1, 2, 3, 4], expected [1, 2, 3, 2, 4]"
    ]
    assert broken_invariants(t, asking(asked[:1])) == ["2 sampled segments, 1 requests"]
    t.segments[0].logprobs[0] = float("nan")
    assert broken_invariants(t, asking(asked)) == ["a logprob is not finite"]
    t.segments[0].logprobs[0] = -0.5
    t.segments[0].logprobs.append(-0.5)
    assert broken_invariants(t, asking(asked))[0] == "lengths 5, 5, 6"


def test_difference_shows_ten_tokens_to_each_side():
    got, expected = list(range(40)), [*range(20), 99, *range(21, 40)]
    assert difference(got, got) is None
    assert difference(got, expected) == (
        f"index 20: got {list(range(10, 31))}, expected {[*range(10, 20), 99, *range(21, 31)]}"
    )
