"""Two real `vllm serve` processes as one engine: numbers, weights, faults and leftovers."""

import asyncio
import functools
import json
import logging
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from agreement import TOLERANCE, distance, sample
from fake_vllm import eventually
from paths import ROOT
from tiny_tasks import SMALL_KINDS, calculator, get_price, get_weather, make_tasks
from trainers import GAP, REWARDS, TOOLS
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_servers import is_free, left_in_group, listening_ports, real_servers

from agent_vllm import (
    ChatFormat,
    Limits,
    StopReason,
    TorchRolloutEngine,
    VLLMServerRolloutEngine,
    rollout_batch,
)
from agent_vllm.engines.server.handshake import probe_request
from agent_vllm.errors import EngineError, InvalidRequestError
from agent_vllm.training import predicted_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]
LONG = 400  # tokens: long enough for an update to find it on its way


@pytest.fixture(scope="module")
def servers(agent_path, tmp_path_factory):
    with real_servers(agent_path, tmp_path_factory.mktemp("servers"), 2) as servers:
        yield servers
    eventually(lambda: not any(server.processes() for server in servers))
    assert all(is_free(server.port) for server in servers)


@pytest.fixture(scope="module")
def shared_engine(servers, agent_path):
    model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(agent_path)
    urls = [server.url for server in servers]
    with VLLMServerRolloutEngine(model, tokenizer, base_urls=urls) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine, agent):
    """On the weights of this test's model."""
    shared_engine.update_policy(agent[0])
    return shared_engine


def post(server, path, body=None):
    request = urllib.request.Request(
        server.url + path,
        json.dumps(body or {}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or "null")


def is_idle(server):
    """A cache can be reset only where no request holds a block of it."""
    return post(server, "/reset_prefix_cache")["success"]


def moved(model, seed):
    """The model after a step in some direction."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


async def generate_long(engine, num=4, tokens=LONG):
    engine.eos_token_ids, kept = (), engine.eos_token_ids  # nothing ends them early
    try:
        return await asyncio.gather(
            *(engine.generate([20, 30 + n], max_new_tokens=tokens, seed=n) for n in range(num))
        )
    finally:
        engine.eos_token_ids = kept


# ---- the same numbers ----


def test_engine_and_learner_agree_after_every_step(engine, agent):
    model, tokenizer = agent
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    before = engine.stats()
    for _ in range(3):
        trajectories = sample(engine, tokenizer, 0.7)
        assert {v for t in trajectories for v in t.policy_versions} == {engine.policy_version}
        assert distance(model, trajectories, 0.7) <= TOLERANCE
        ids = torch.tensor([trajectories[0].prompt_ids + trajectories[0].completion_ids])
        model.train()(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.update_policy(model)
    since = engine.stats().since(before)
    assert 0 < since.num_cached_tokens < since.num_prompt_tokens  # turns find their prefix


def test_samples_differ_and_seeds_repeat(engine, agent):
    first, second = (sample(engine, agent[1], 1.0) for _ in range(2))
    assert [t.completion_ids for t in first] == [t.completion_ids for t in second]
    assert any(
        first[row].completion_ids != first[row + 1].completion_ids for row in range(0, 24, 2)
    )


def test_stop_strings_end_a_turn_where_they_do_in_the_torch_engine(engine, agent):
    model, tokenizer = agent
    prompt = tokenizer.apply_chat_template(
        make_tasks("train", 1, kinds=SMALL_KINDS)[0]["prompt"], return_dict=False
    )
    with TorchRolloutEngine(model, tokenizer) as reference:
        outcomes = [
            asyncio.run(
                e.generate(prompt, max_new_tokens=40, temperature=0.0, stop_strings=["e", "a"])
            )
            for e in (engine, reference)
        ]
    assert outcomes[0].token_ids == outcomes[1].token_ids
    assert [outcome.finish_reason for outcome in outcomes] == ["stop", "stop"]


def test_an_invalid_request_is_refused_here_and_there(engine):
    with pytest.raises(InvalidRequestError, match="out of the engine's vocabulary"):
        asyncio.run(engine.generate([engine.vocab_size], max_new_tokens=1))
    with pytest.raises(EngineError, match=r"400.*vocabulary"):
        engine._sample_all([probe_request([engine.vocab_size + 1000])])
    assert len(asyncio.run(engine.generate([20], max_new_tokens=2)).token_ids) >= 1


def test_a_cancelled_wait_ends_the_request_on_its_server(engine, servers):
    async def cancel():
        task = asyncio.create_task(generate_long(engine, 4, 900))
        await asyncio.to_thread(eventually, lambda: not all(map(is_idle, servers)), 60.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    eventually(lambda: all(map(is_idle, servers)), 60.0)


# ---- updates with requests in flight ----


def update_in_flight(engine, model, servers):
    """Completions that an update found on their way."""
    completions = []
    rollout = threading.Thread(
        target=lambda: completions.extend(asyncio.run(generate_long(engine)))
    )
    rollout.start()
    eventually(lambda: all(server.tasks for server in engine._fleet.members.servers), 60.0)
    time.sleep(0.3)  # what is cut has to have begun
    engine.update_policy(model)
    rollout.join()
    return completions


def learner_logprobs(model, prompt_ids, completion):
    ids = torch.tensor([prompt_ids + completion.token_ids])
    with torch.no_grad():
        logits = model.eval()(ids).logits
    return predicted_logprobs(logits, ids)[0, len(prompt_ids) - 1 :]


def test_requests_go_on_under_new_weights_and_say_which_made_each_token(
    engine, agent, agent_path, servers
):
    old = agent[0]
    new = moved(AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32"), 1)
    version = engine.policy_version
    completions = update_in_flight(engine, new, servers)
    assert engine.policy_version == version + 1
    cut = [c for c in completions if c.token_versions is not None]
    assert cut, "the update found nothing on its way"
    for n, completion in enumerate(completions):
        versions = completion.token_versions or [completion.policy_version] * LONG
        assert versions == sorted(versions) and set(versions) <= {version, version + 1}
        assert len(completion.token_ids) == LONG and completion.policy_version == versions[0]
        by_version = {
            version: learner_logprobs(old, [20, 30 + n], completion),
            version + 1: learner_logprobs(new, [20, 30 + n], completion),
        }
        expected = torch.stack([by_version[v][index] for index, v in enumerate(versions)])
        assert (expected - torch.tensor(completion.logprobs)).abs().max() <= TOLERANCE


def test_an_update_can_wait_for_requests(engine, agent_path, servers, monkeypatch):
    monkeypatch.setattr(engine, "_in_flight", "wait")
    new = moved(AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32"), 2)
    version = engine.policy_version
    completions = update_in_flight(engine, new, servers)
    assert [c.token_versions for c in completions] == [None] * 4
    assert [c.policy_version for c in completions] == [version] * 4
    assert [len(c.token_ids) for c in completions] == [LONG] * 4
    assert engine.policy_version == version + 1


# ---- what a trainer leaves behind ----


def test_an_update_that_was_never_finished_is_mended_by_the_next_trainer(
    engine, agent, servers, agent_path
):
    model, tokenizer = agent
    for server in servers:  # where a trainer can have been killed
        post(server, "/pause?mode=abort")
        post(server, "/collective_rpc", {"method": "name_weights", "args": ["unfinished"]})
        post(server, "/start_weight_update")
    urls = [server.url for server in servers]
    with VLLMServerRolloutEngine(model, tokenizer, base_urls=urls) as second:
        assert distance(model, sample(second, tokenizer, 1.0), 1.0) <= TOLERANCE


def test_an_update_that_leaves_weights_out_is_refused(engine, servers):
    server = servers[0]
    post(server, "/start_weight_update")
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, "/update_weights", {"update_info": {"is_complete": True}})
    assert "No weights came for" in refused.value.read().decode()


def test_weights_that_somebody_else_loads_are_noticed_before_their_tokens_are_used(
    engine, agent, agent_path, servers, caplog
):
    new = moved(AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32"), 3)
    engine.update_policy(new)
    label = json.loads(urllib.request.urlopen(f"{servers[0].url}/weight_info").read())
    post(servers[0], "/collective_rpc", {"method": "reload_weights"})  # those on disk
    assert json.loads(urllib.request.urlopen(f"{servers[0].url}/weight_info").read()) == label
    with caplog.at_level(logging.WARNING):
        trajectories = sample(engine, agent[1], 1.0)
    assert distance(new, trajectories, 1.0) <= TOLERANCE
    out = [message for message in caplog.messages if "somebody else wrote to it" in message]
    assert len(out) == 1 and out[0].startswith(f"{servers[0].url} is out")
    engine.update_policy(new)
    assert [server.is_in for server in engine._fleet.members.servers] == [True, True]


TRAINER = """
import asyncio, sys
from agent_vllm import create_rollout_engine
name, model, ending, *urls = sys.argv[1:]
options = {"base_urls": urls} if urls else {"max_num_seqs": 16}
async def many():
    if ending == "done":
        await engine.generate([20, 30], max_new_tokens=4)
        return
    async with asyncio.TaskGroup() as group:
        for n in range(9):
            group.create_task(engine.generate([20, n], max_new_tokens=900))
        if ending == "raises":
            await asyncio.sleep(0.5)
            raise RuntimeError("on purpose")
with create_rollout_engine(name, model, **options) as engine:
    engine.eos_token_ids = ()
    print("ready", flush=True)
    asyncio.run(many())
    while ending != "done":
        asyncio.run(many())
"""
ENDINGS = {"done": 0, "raises": 1, "SIGINT": -signal.SIGINT, "SIGKILL": -signal.SIGKILL}


@pytest.mark.parametrize("name", ["vllm-server", "vllm"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_a_trainer_ends_nothing_is_left(engine, servers, agent_path, name, ending):
    """No process, port or memory of its own, no request on a server."""
    urls = [server.url for server in servers] if name == "vllm-server" else []
    command = [sys.executable, "-c", TRAINER, name, str(agent_path), ending, *urls]
    before = set(Path("/dev/shm").iterdir())
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as trainer:
        assert trainer.stdout.readline() == "ready\n"
        family = [psutil.Process(trainer.pid), *psutil.Process(trainer.pid).children(True)]
        ports = [port for process in family for port in listening_ports(process)]
        if ending.startswith("SIG"):
            if urls:
                eventually(lambda: not any(map(is_idle, servers)), 60.0)
            trainer.send_signal(signal.Signals[ending])
        assert trainer.wait(60) == ENDINGS[ending]
    eventually(lambda: not any(process.is_running() for process in family))
    eventually(lambda: not left_in_group(trainer.pid))
    assert all(map(is_free, ports))
    eventually(lambda: all(map(is_idle, servers)), 60.0)
    assert set(Path("/dev/shm").iterdir()) <= before


def test_the_trainer_trains_with_servers(new_trainer, servers):
    urls = [server.url for server in servers]
    trainer = new_trainer(
        "vllm-server", rollout_engine_kwargs={"base_urls": urls}, max_steps=2, max_turns=4,
        reward_funcs=REWARDS, tools=TOOLS,
    )  # fmt: skip
    before = trainer.rollout_engine.policy_version
    trainer.train()
    assert trainer.rollout_engine.policy_version == before + 2 + 1  # each step, and at the start
    for log in trainer.state.log_history[:2]:
        assert log["sampling/logprob_gap/max"] <= GAP
        assert log["rollout/stop_reason/engine_error"] == 0.0


# ---- the last ones: they end a server ----


def killing(tool, server):
    """The tool; the first call of any ends the server."""

    @functools.wraps(tool)
    def call(*args, **kwargs):
        if server.process.poll() is None:
            server.kill()
        return tool(*args, **kwargs)

    return call


def test_a_server_that_is_killed_in_a_rollout_loses_nothing(engine, agent, servers, caplog):
    model, tokenizer = agent
    rows = make_tasks("train", 12, kinds=SMALL_KINDS)
    tools = [killing(tool, servers[0]) for tool in (calculator, get_weather, get_price)]
    with caplog.at_level(logging.WARNING):
        trajectories = rollout_batch(
            engine,
            ChatFormat.from_tokenizer(tokenizer),
            [row["prompt"] for row in rows],
            [tools] * len(rows),
            limits=Limits(max_turns=4, max_completion_tokens=200),
            seed=5,
        )
    assert StopReason.ENGINE_ERROR not in {t.stop_reason for t in trajectories}
    assert distance(model, trajectories, 1.0) <= TOLERANCE
    names = [m.split(" moves from")[0] for m in caplog.messages if "moves from" in m]
    assert names and len(set(names)) == len(names)
    places = {name.split(", ", 1)[1] for name in names}  # after the rollout's own name
    assert places <= {f"row {row}, sample 0" for row in range(12)}
    engine.update_policy(model)  # goes on with who is left
    assert distance(model, sample(engine, tokenizer, 1.0), 1.0) <= TOLERANCE


def test_a_server_that_is_killed_and_started_again_between_updates_is_used_again(
    engine, agent, servers
):
    model, tokenizer = agent
    server = servers[0]
    if server.process.poll() is None:
        server.kill()
    server.start()
    server.wait_until_ready()
    engine.update_policy(moved(model, 4))
    before = [s.incarnation for s in engine._fleet.members.servers]
    assert [s.is_in for s in engine._fleet.members.servers] == [True, True]
    server.kill()  # and again, with nobody asking in between
    server.start()
    server.wait_until_ready()
    engine.update_policy(moved(model, 5))
    assert [s.incarnation for s in engine._fleet.members.servers] == [before[0] + 1, before[1]]
    assert distance(model, sample(engine, tokenizer, 1.0), 1.0) <= TOLERANCE
