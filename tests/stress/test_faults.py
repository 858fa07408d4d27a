"""The faulty engine and tools do what they say, and a rollout makes of it what it should."""

import asyncio
import json

import pytest
from fakes import ADD, add, user
from tool_calls import ask, failed, run, tool

from agent_vllm.errors import EngineError
from agent_vllm.rollout import rollout_batch
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.tools import ToolFailure, encode_result
from agent_vllm.types import StopReason
from stress.faults import ODD_VALUES, Fault, FaultyEngine, faulty

LOST = {
    Fault.REQUEST_ERROR: "On purpose: the request failed.",
    Fault.OUT_OF_MEMORY: "On purpose: out of memory.",
    Fault.NAN_LOGPROB: "gave logprob nan for token 2 of 5",
    Fault.MISSING_LOGPROBS: "gave logprob None for token 0 of 5",
    Fault.WRONG_LENGTH: "tokens where",
}


def ended(chat, faults, num_generations=1, **options):
    """Stop reasons and errors of a rollout of one tool call and an answer, and the engine."""
    engine = FaultyEngine(
        ScriptedRolloutEngine(chat.tokenizer, lambda request: answer(chat, request)),
        faults,
        **options,
    )
    trajectories = rollout_batch(engine, chat, [user()], [[add]], num_generations, seed=1)
    return [(t.stop_reason, t.error) for t in trajectories], engine


def answer(chat, request):
    has_result = "3" in chat.tokenizer.decode(request.prompt_ids[-40:])
    text = "done" if has_result else ADD
    return [*chat.tokenizer(text, add_special_tokens=False)["input_ids"], chat.end_token_ids[0]]


def test_without_faults_it_is_the_engine(chat):
    assert ended(chat, {})[0] == [(StopReason.ANSWERED, None)]
    assert ended(chat, [None, Fault.HANG], hang_s=0.0)[0] == [(StopReason.ANSWERED, None)]


@pytest.mark.parametrize(("fault", "error"), LOST.items())
def test_a_fault_is_met_with_one_retry(chat, fault, error):
    """The second of two turns is spoiled: once, then twice."""
    assert ended(chat, [None, fault])[0] == [(StopReason.ANSWERED, None)]
    ((reason, told),), engine = ended(chat, [None, fault, fault])
    assert reason == StopReason.ENGINE_ERROR and error in told
    assert engine.met == {fault: 2} and engine.death is None


def test_a_dead_engine_is_not_asked_again(chat):
    told, engine = ended(chat, [None, Fault.ENGINE_DEATH])
    assert told == [(StopReason.ENGINE_ERROR, "On purpose: the engine is dead.")]
    assert engine.met == {Fault.ENGINE_DEATH: 1}
    assert engine.death == "On purpose: the engine is dead."


def test_death_is_for_ever_and_an_error_is_not(chat):
    def two_requests(fault):
        inner = ScriptedRolloutEngine(chat.tokenizer, ["hi"])
        engine, outcomes = FaultyEngine(inner, [fault]), []
        for _ in range(2):
            try:
                asyncio.run(engine.generate([1], max_new_tokens=9))
                outcomes.append("ok")
            except EngineError:
                outcomes.append("error")
        return outcomes

    assert two_requests(Fault.REQUEST_ERROR) == ["error", "ok"]
    assert two_requests(Fault.ENGINE_DEATH) == ["error", "error"]


def test_shares_are_met_by_seed_and_request_alone(chat):
    shares = dict.fromkeys(LOST, 0.08)
    first, engine = ended(chat, shares, 64)
    again, _ = ended(chat, shares, 64)
    other, _ = ended(chat, shares, 64, seed=1)
    assert first == again and first != other
    num_errors = sum(reason == StopReason.ENGINE_ERROR for reason, _ in first)
    assert 0 < num_errors < engine.met.total() < 128
    assert set(engine.met) == set(shares)


def test_it_brings_its_engines_weights_and_seeds(chat):
    inner, twin = (ScriptedRolloutEngine(chat.tokenizer, ["hi"]) for _ in range(2))
    engine = FaultyEngine(inner, {})
    assert engine.next_seed() == twin.next_seed()
    assert engine.update_policy(None) == inner.policy_version == 1
    ask_both = [e.generate([1], max_new_tokens=4) for e in (engine, inner)]
    assert asyncio.run(ask_both[0]) == asyncio.run(ask_both[1])


@pytest.mark.parametrize("shares", [{Fault.HANG: -0.1}, {Fault.HANG: 0.6, Fault.NAN_LOGPROB: 0.6}])
def test_shares_that_are_none(chat, shares):
    with pytest.raises(ValueError, match="Shares must be 0 or more and add up to at most 1"):
        FaultyEngine(ScriptedRolloutEngine(chat.tokenizer, ["hi"]), shares)


# ---- tools ----


def double(a):
    return 2 * a


async def double_async(a):
    return 2 * a


@pytest.mark.parametrize("function", [double, double_async])
def test_a_faulty_tool(function):
    plain = tool(function, a={"type": "integer"})
    calls = [ask(a=1)]
    assert run(calls, [faulty(plain)]) == [("ok", "2")]
    broken = failed("RuntimeError: On purpose: the tool failed.")
    assert run(calls, [faulty(plain, raise_share=1)]) == [broken]
    late = failed("Timed out after 0.1 s.")
    assert run(calls, [faulty(plain, sleep_share=1, sleep_s=1)], timeout_s=0.1) == [late]
    assert run(calls, [faulty(plain, sleep_share=1, sleep_s=0.01)]) == [("ok", "2")]
    assert run([ask(a="1")], [faulty(plain)])[0][0] == "invalid"


def test_every_odd_value_comes_and_becomes_a_result():
    odd = faulty(tool(double, a={"type": "integer"}), odd_share=1)
    results = run([ask(a=a) for a in range(200)], [odd])
    assert {content for _, content in results} == {text_of(value) for value in ODD_VALUES}
    json.dumps(results).encode()  # no lone surrogates


def text_of(value):
    try:
        return encode_result(value)
    except ToolFailure as failure:
        return encode_result({"error": str(failure)})


def test_a_seed_chooses_the_calls():
    def outcomes(seed):
        wrapped = faulty(tool(double, a={"type": "integer"}), raise_share=0.5, seed=seed)
        told = run([ask(a=a % 20) for a in range(40)], [wrapped])
        # of two equal calls at a time, either may be the first
        return sorted((index % 20, status) for index, (status, _) in enumerate(told))

    assert outcomes(0) == outcomes(0) != outcomes(1)
    assert 5 < [status for _, status in outcomes(0)].count("failed") < 35
