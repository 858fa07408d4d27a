"""Servers that fail: every request is answered once, in time, by whoever is left."""

import asyncio
import logging

import pytest
from fake_vllm import DROP, HANG, TOKEN, Status, completion, eventually, fake_server
from transformers import AutoModelForCausalLM

from agent_vllm import create_rollout_engine
from agent_vllm.engines.server.weight_transfer import BACKENDS, MEMORY_BACKEND, MemoryTransfer
from agent_vllm.errors import EngineError, WeightSyncError

GENERATE = "/inference/v1/generate"


@pytest.fixture
def servers(agent_path):
    with fake_server(agent_path) as first, fake_server(agent_path) as second:
        yield first, second


@pytest.fixture
def build(agent_path):
    engines = []

    def build(*servers, **options):
        urls = [server.url for server in servers]
        engine = create_rollout_engine("vllm-server", agent_path, base_urls=urls, **options)
        for server in servers:
            server.bodies.clear()
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def generate(engine, **options):
    return asyncio.run(engine.generate([20, 30], max_new_tokens=3, **options))


def in_turn(*answers):
    """The first call gets the first answer, and so on; later ones all get a completion."""
    left = list(answers)

    def answer(body):
        return left.pop(0) if left else completion(body)

    return answer


def request_ids(*servers):
    return [body["request_id"] for server in servers for body in server.bodies.get(GENERATE, [])]


@pytest.mark.parametrize("failure", [Status(500, "out of luck"), DROP])
def test_a_failed_request_is_sent_again_under_another_id(build, servers, failure):
    server, _ = servers
    engine = build(server)
    server.answers[GENERATE] = in_turn(failure)
    before = engine.stats().num_prompt_tokens
    assert generate(engine).token_ids == [TOKEN] * 3
    first, second = request_ids(server)
    assert first != second
    assert engine.stats().num_prompt_tokens - before == 2  # nothing is counted twice


def test_a_request_that_goes_on_failing_is_given_up_with_what_was_said(build, servers):
    server, _ = servers
    engine = build(server)
    server.answers[GENERATE] = Status(500, "out of luck")
    with pytest.raises(EngineError, match=rf"failed 3 times, the last.*{GENERATE}: 500 out of"):
        generate(engine)


def test_a_server_that_stays_silent_is_waited_for_no_longer_than_said(build, servers):
    server, _ = servers
    engine = build(server, request_timeout_s=0.2)
    server.answers[GENERATE] = HANG
    with pytest.raises(EngineError, match=rf"{GENERATE}: no answer within 0.2 s.*says that it is"):
        generate(engine)
    assert len(request_ids(server)) == 1


def test_a_request_that_is_refused_is_not_sent_again(build, servers):
    server, _ = servers
    engine = build(server)
    server.answers[GENERATE] = Status(400, "no such thing")
    with pytest.raises(EngineError, match="400 no such thing"):
        generate(engine)
    assert len(request_ids(server)) == 1


def test_requests_of_a_trajectory_stay_and_trajectories_spread(build, servers):
    engine = build(*servers)

    async def turns():
        for _ in range(3):
            await asyncio.gather(
                *(
                    engine.generate([20, 30 + n], max_new_tokens=3, affinity=f"row {n}")
                    for n in range(4)
                )
            )

    asyncio.run(turns())
    seen = [{body["token_ids"][1] for body in server.bodies[GENERATE]} for server in servers]
    assert list(map(len, seen)) == [2, 2] and not seen[0] & seen[1]
    assert [len(server.bodies[GENERATE]) for server in servers] == [6, 6]


def test_a_trajectory_that_has_ended_takes_up_no_place(build, servers):
    engine = build(*servers)
    for number in range(4):
        generate(engine, affinity=f"row {number}")
    engine.forget("row 0")
    engine.forget("row 2")  # both lived on the first server
    for number in (4, 5):
        generate(engine, affinity=f"row {number}")
    assert [len(server.bodies[GENERATE]) for server in servers] == [4, 2]


def test_what_a_dead_server_had_goes_on_elsewhere_and_the_log_says_so(build, servers, caplog):
    first, second = servers
    engine = build(*servers)
    first.answers[GENERATE] = HANG

    async def rollout():
        waiting = [
            asyncio.create_task(engine.generate([20, 30], max_new_tokens=3, affinity=f"row {row}"))
            for row in range(4)
        ]
        await asyncio.to_thread(eventually, lambda: len(first.bodies.get(GENERATE, [])) == 2)
        await asyncio.to_thread(first.stop)
        return await asyncio.gather(*waiting)

    with caplog.at_level(logging.WARNING):
        completions = asyncio.run(rollout())
    assert [c.token_ids for c in completions] == [[TOKEN] * 3] * 4
    assert len(set(request_ids(first, second))) == 6  # two of them asked again
    moved = [m for m in caplog.messages if "moves from" in m]
    assert len(moved) == 2 and all(f"from {first.url} to {second.url}" in m for m in moved)
    assert generate(engine).token_ids == [TOKEN] * 3  # nobody asks the dead one any more


def test_a_silent_server_is_noticed_by_looking_at_it(build, servers):
    first, second = servers
    engine = build(first, second, health_interval_s=0.05)
    first.answers[GENERATE] = HANG
    first.answers["/collective_rpc"] = lambda body: (
        first.call_worker(body) if not first.bodies.get(GENERATE) else Status(500, "dead")
    )

    async def both():
        return await asyncio.gather(
            *(engine.generate([20], max_new_tokens=3, affinity=name) for name in ("one", "two"))
        )

    assert [c.token_ids for c in asyncio.run(both())] == [[TOKEN] * 3] * 2


def test_with_no_server_left_the_error_says_why_each_is_out(build, servers):
    server, _ = servers
    engine = build(server)
    server.stop()
    with pytest.raises(EngineError, match=rf"{server.url} is out|No server is left. {server.url}"):
        generate(engine)
    with pytest.raises(EngineError, match=f"No server is left. {server.url}"):
        generate(engine)


@pytest.fixture
def synced(build, servers, agent_path):
    """An engine that has sent its weights to both servers, and the learner."""
    engine = build(*servers)
    model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
    engine._is_checked = True  # a stand-in has no weights to compare
    engine.update_policy(model)
    return engine, model


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param("default", id="started again"),
        pytest.param(None, id="written to by somebody else"),
        pytest.param("1:0f", id="named by somebody else"),
    ],
)
def test_tokens_of_other_weights_are_dropped_until_the_server_has_the_right_ones(
    synced, servers, caplog, shown
):
    (first, second), (engine, model) = servers, synced
    assert first.label == second.label != "default"
    first.name_weights(shown)
    assert [generate(engine).token_ids for _ in range(4)] == [[TOKEN] * 3] * 4
    assert len(request_ids(first)) == 1  # what it sampled is dropped
    assert len(request_ids(second)) == 4
    assert any(f"its weights are {shown!r}, not" in message for message in caplog.messages)
    engine.update_policy(model)
    assert first.label == second.label
    for number in range(4):
        generate(engine, affinity=f"row {number}")
    assert len(request_ids(first)) > 1


def test_each_update_has_a_name_that_nobody_else_gives(build, servers, agent_path, synced):
    (first, _), (engine, model) = servers, synced
    names = [first.label]
    for _ in range(2):
        engine.update_policy(model)
        names.append(first.label)
    versions, numbers = zip(*(name.split(":") for name in names), strict=True)
    assert versions == ("1", "2", "3") and len(set(numbers)) == 3
    assert {len(number) for number in numbers} == {32}


def test_with_other_weights_everywhere_the_error_names_them(synced, servers):
    engine, _ = synced
    for server in servers:
        server.name_weights(None)
    with pytest.raises(EngineError, match=r"No server is left.*its weights are None, not '1:"):
        generate(engine)


def test_many_answers_share_one_question_for_the_weights(synced, servers):
    engine, _ = synced
    for server in servers:
        server.bodies.clear()

    async def many():
        rows = range(64)
        await asyncio.gather(*(engine.generate([20, 30 + n], max_new_tokens=3) for n in rows))

    asyncio.run(many())
    assert sum(len(server.bodies[GENERATE]) for server in servers) == 64
    assert sum(len(server.bodies["/collective_rpc"]) for server in servers) < 48


@pytest.mark.parametrize("route", ["/start_weight_update", "/update_weights", "/pause"])
def test_a_server_that_fails_in_an_update_is_out_and_the_other_goes_on(
    synced, servers, caplog, route
):
    (first, second), (engine, model) = servers, synced
    works, first.answers[route] = first.answers[route], Status(500, "out of luck")
    assert engine.update_policy(model) == 2
    first.bodies.clear()
    assert [generate(engine).policy_version for _ in range(4)] == [2] * 4
    assert len(request_ids(first)) == 0 and len(request_ids(second)) == 4
    assert any(f"{route}: 500 out of luck" in message for message in caplog.messages)
    first.answers[route] = works
    engine.update_policy(model)
    assert first.label == second.label


def test_a_dead_server_is_told_of_once_where_another_process_sends_the_weights(
    build, servers, caplog
):
    dead, alive = servers
    engine = build(dead, alive)
    dead.stop()
    with caplog.at_level(logging.WARNING):
        for version, label in enumerate(["first", "second", "third"]):
            alive.name_weights(label)
            engine._thread.call(engine._fleet.gate.adopt(version, label))
            assert generate(engine).token_ids == [TOKEN] * 3
    assert [f"{dead.url} is out" in message for message in caplog.messages] == [True]


def test_closing_the_engine_shuts_its_weight_transfer_down(build, servers, monkeypatch):
    closed = []

    class Noted(MemoryTransfer):
        def close(self):
            closed.append(self)

    monkeypatch.setitem(BACKENDS, MEMORY_BACKEND, lambda group_port: Noted())
    engine = build(servers[0])
    assert closed == []
    engine.close()
    assert len(closed) == 1


def test_a_cache_that_is_not_reset_fails_the_update(build, servers, agent_path):
    server, _ = servers
    engine = build(server)
    server.answers["/reset_prefix_cache"] = {"success": False}
    model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
    with pytest.raises(WeightSyncError, match="refused to reset its prefix cache"):
        engine.update_policy(model)
    refusal = "until a weight update succeeds.*refused to reset its prefix cache"
    with pytest.raises(EngineError, match=refusal):
        generate(engine)
    assert engine.policy_version == 0
    server.answers["/reset_prefix_cache"] = {"success": True}
    engine._is_checked = True
    engine.update_policy(model)  # takes it back
    assert generate(engine).policy_version == 1


def test_a_closed_engine_says_so(build, servers):
    engine = build(servers[0])
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        generate(engine)


def test_closing_answers_whoever_waits(build, servers):
    server, _ = servers
    engine = build(server)
    server.answers[GENERATE] = HANG

    async def wait():
        task = asyncio.create_task(engine.generate([20], max_new_tokens=3))
        await asyncio.to_thread(eventually, lambda: bool(request_ids(server)))
        await asyncio.to_thread(engine.close)
        await task

    with pytest.raises(EngineError, match="closed"):
        asyncio.run(wait())
