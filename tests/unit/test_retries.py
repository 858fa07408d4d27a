"""A request that the engine fails is retried, and nothing of the fault is left behind."""

import asyncio
import dataclasses
import math

import pytest
from fakes import ADD, add, broken_invariants, tail, user

from agent_vllm.errors import EngineDeadError, EngineError
from agent_vllm.rollout import RolloutStatus, rollout_batch
from agent_vllm.settings import Limits
from agent_vllm.types import StopReason

DONE = "done"


@pytest.fixture
def failing(scripted):
    """Engines that call a tool and then answer, but fail the requests of these numbers."""

    def make(*numbers, error=None):
        def script(request):
            number = len(engine.requests) - 1
            if number in numbers:
                return error or EngineError(f"lost {number}")
            had_result = "<tool_call>" in engine.tokenizer.decode(request.prompt_ids)
            return engine.encode_turn(DONE if had_result else ADD)

        engine = scripted(script)
        return engine

    return make


def told(engine, chat, **options):
    status = RolloutStatus()
    (t,) = rollout_batch(engine, chat, [user()], [[add]], seed=5, status=status, **options)
    return t, status


def without_times(t):
    return dataclasses.replace(t, turns=[_without_times(turn) for turn in t.turns])


def _without_times(turn):
    calls = [dataclasses.replace(record, span=None) for record in turn.calls]
    return dataclasses.replace(turn, span=None, calls=calls)


@pytest.mark.parametrize("numbers", [[0], [1], [0, 2]])
def test_a_fault_changes_nothing_of_the_trajectory(chat, failing, numbers):
    plain, calm = told(failing(), chat)
    engine = failing(*numbers)
    t, status = told(engine, chat)
    assert without_times(t) == without_times(plain)
    assert [(s.kind, s.name) for s in t.spans] == [(s.kind, s.name) for s in plain.spans]
    assert t.stop_reason is StopReason.ANSWERED
    counts = [(s.num_turns, s.num_sampled_tokens, s.num_retries) for s in (calm, status)]
    assert counts == [(2, plain.num_sampled_tokens, 0), (2, plain.num_sampled_tokens, len(numbers))]
    answered = [r for number, r in enumerate(engine.requests) if number not in numbers]
    assert broken_invariants(t, answered) == []


def test_the_retry_is_the_same_request(chat, failing):
    engine = failing(1)
    told(engine, chat)
    first, again = engine.requests[1:]
    for field in dataclasses.fields(first):
        assert getattr(first, field.name) == getattr(again, field.name), field.name


def test_after_the_second_fault_the_earlier_turns_are_kept(chat, failing):
    t, status = told(failing(1, 2), chat)
    assert (t.stop_reason, t.error) == (StopReason.ENGINE_ERROR, "lost 2")
    assert tail(chat, t).startswith(ADD) and "3" in tail(chat, t)
    assert [segment.is_sampled for segment in t.segments] == [True, False]
    assert (status.num_retries, status.num_turns) == (1, 1)


@pytest.mark.parametrize("error", [EngineDeadError("gone")])
def test_a_dead_engine_is_not_asked_again(chat, failing, error):
    engine = failing(1, error=error)
    t, status = told(engine, chat)
    assert (t.stop_reason, t.error, status.num_retries) == (StopReason.ENGINE_ERROR, "gone", 0)
    assert len(engine.requests) == 2


def test_an_invalid_request_is_not_made_again(chat, failing):
    engine = failing()
    engine.vocab_size = 3
    t, status = told(engine, chat)
    assert t.stop_reason is StopReason.ENGINE_ERROR
    assert (engine.requests, status.num_retries) == ([], 0)


@pytest.mark.parametrize("limit", ["turn_deadline_s", "deadline_s"])
def test_no_retry_after_the_deadline(chat, failing, limit):
    engine = failing(1)
    sample = engine._sample

    async def late(request):
        if engine.requests:
            await asyncio.sleep(0.2)
        return await sample(request)

    engine._sample = late
    t, status = told(engine, chat, limits=Limits(**{limit: 0.1}))
    assert (t.stop_reason, t.error) == (StopReason.DEADLINE, None)
    assert [segment.is_sampled for segment in t.segments] == [True, False]
    assert (status.num_retries, len(engine.requests)) == (0, 1)


@pytest.mark.parametrize("spoil", ["nan", "none", "long"])
def test_what_an_engine_got_wrong_is_asked_for_again(chat, failing, spoil):
    engine = failing()
    sample, plain = engine._sample, told(failing(), chat)[0]

    async def spoiled(request):
        completion = await sample(request)
        if len(engine.requests) != 2:
            return completion
        n = len(completion.token_ids)
        logprobs = {"nan": [math.nan] * n, "none": [None] * n, "long": [-0.5] * 9999}[spoil]
        return dataclasses.replace(
            completion, token_ids=(completion.token_ids * 9999)[: len(logprobs)], logprobs=logprobs
        )

    engine._sample = spoiled
    t, status = told(engine, chat)
    assert without_times(t) == without_times(plain)
    assert [(s.kind, s.name) for s in t.spans] == [(s.kind, s.name) for s in plain.spans]
    assert status.num_retries == 1
