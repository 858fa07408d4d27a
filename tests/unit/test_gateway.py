"""Agents with a loop of their own: parity with our loop, limits, refusals and faults."""

import asyncio
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import openai
import pytest
from client_agents import ask, looping, schemas, told
from fakes import ADD, add, by_prompt, call, difference, shout, user
from paths import TESTS

from agent_vllm.errors import EngineError
from agent_vllm.gateway import rollout_agent
from agent_vllm.rollout import rollout_batch
from agent_vllm.settings import Limits
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.types import StopReason

OFFERED = {"tools": schemas([add])}
ROWS = [{"prompt": user("one")}, {"prompt": user("two")}]


def one(chat, engine, agent, row=ROWS[0], **options):
    [trajectory] = rollout_agent(engine, chat, agent, [row], seed=1, **options)
    return trajectory


def saying(row, client):
    """A sync agent."""
    completion = client.chat.completions.create(model="policy", messages=row["prompt"])
    return completion.choices[0].message.content


# ---- parity with our own loop ----

LONG = call("shout", text="a" * 30)


@pytest.mark.parametrize(
    "limits, reasons",
    [
        (Limits(), ["answered", "answered"]),
        (Limits(max_turns=1), ["max_turns", "max_turns"]),
        (Limits(max_tool_rounds=1), ["answered", "max_turns"]),
        (Limits(max_new_tokens=20), ["turn_length", "turn_length"]),
        (Limits(max_completion_tokens=90), ["answered", "completion_budget"]),
        (Limits(max_completion_tokens=100), ["answered", "completion_budget"]),
        (Limits(max_tool_result_tokens=4), ["answered", "answered"]),
    ],
    ids=str,
)
def test_a_linear_agent_has_the_ids_of_our_own_loop(chat, scripted, limits, reasons):
    tools = [add, shout]
    script = {"one": [ADD, "3"], "two": [LONG, f"{ADD}{ADD}", "6"]}
    own = rollout_batch(
        scripted(by_prompt(chat, **script)),
        chat,
        [row["prompt"] for row in ROWS],
        [tools] * 2,
        seed=1,
        limits=limits,
    )
    agents = rollout_agent(
        scripted(by_prompt(chat, **script)), chat, looping(tools), ROWS, seed=1, limits=limits
    )
    assert [t.stop_reason for t in own] == [t.stop_reason for t in agents] == reasons
    for a, b in zip(own, agents, strict=True):
        assert difference(b.prompt_ids, a.prompt_ids) is None
        assert difference(b.completion_ids, a.completion_ids) is None
        assert (b.completion_mask, b.logprobs) == (a.completion_mask, a.logprobs)
        assert (b.branches, len(b.calls)) == ([], len(a.calls))


def test_requests_have_the_seeds_of_our_own_loop(chat, scripted):
    engines = [scripted([ADD, "3"]) for _ in range(2)]
    rollout_batch(engines[0], chat, [user()], [[add]], seed=7)
    rollout_agent(engines[1], chat, looping([add]), [{"prompt": user()}], seed=7)
    seeds = [[request.seed for request in engine.requests] for engine in engines]
    assert seeds[0] == seeds[1]
    checked = [request.num_checked_ids for request in engines[1].requests]
    assert checked == [0, len(engines[1].requests[0].prompt_ids) + 51]


def test_the_samples_of_a_row_are_together_and_have_their_outputs(chat, scripted):
    engine = scripted(by_prompt(chat, one=["a", "a"], two=["b", "b"]))
    trajectories = rollout_agent(engine, chat, saying, ROWS, num_generations=2, seed=1)
    assert [t.output for t in trajectories] == ["a", "a", "b", "b"]
    assert len({request.seed for request in engine.requests}) == 4


# ---- fields ----


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"temperature": 0.2}, r"`temperature` must be the rollout's, 1, got 0.2"),
        ({"top_p": 0.9}, r"`top_p` must be the rollout's"),
        ({"n": 2}, r"`n` can't be obeyed, got 2\. Send one request per answer"),
        ({"seed": 3}, r"`seed` can't be obeyed, got 3\. Each trajectory has its own"),
        ({"tool_choice": "required"}, r"`tool_choice` can't be obeyed"),
        ({"response_format": {"type": "json_object"}}, r"`response_format.type` can't be obeyed"),
        ({"logprobs": True}, r"`logprobs` must be False, got True"),
        ({"max_tokens": 0}, r"`max_tokens` must be greater than or equal to 1, got 0"),
        ({"frequency_penalty": 0.5}, r"`frequency_penalty` must be"),
        ({"store": True}, r"`store` must be False"),
        ({"extra_body": {"min_tokens": 3}}, r"`min_tokens` can't be obeyed, got 3"),
        ({"tools": [{"type": "function", "function": {}}]}, r"a dict with a `name`"),
        ({"tools": [*schemas([add]), *schemas([add])]}, r"Two tools are named `add`"),
        ({"messages": []}, r"`messages` must"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"Rollouts are text only",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_that_cannot_be_obeyed_is_refused_by_name(chat, scripted, fields, error):
    async def agent(row, client):
        with pytest.raises(openai.BadRequestError, match=error):
            await ask(client, **{"messages": user(), **fields})
        return await ask(client, user())

    engine = scripted(["a"])
    assert one(chat, engine, agent).stop_reason is StopReason.ANSWERED
    assert len(engine.requests) == 1


def test_fields_that_change_nothing_are_taken(chat, scripted):
    fields = {
        "temperature": 1.0, "top_p": 1, "n": 1, "tool_choice": "auto", "logprobs": False,
        "parallel_tool_calls": True, "response_format": {"type": "text"}, "store": False,
        "prompt_cache_key": "me", "metadata": {"run": "1"}, "presence_penalty": 0, **OFFERED,
    }  # fmt: skip

    async def agent(row, client):
        return await ask(client, user(), **fields)

    assert one(chat, scripted(["a"]), agent).output == {"role": "assistant", "content": "a"}


def test_the_clients_own_token_limit_and_stop_strings_are_obeyed(chat, scripted):
    async def agent(row, client):
        completion = await client.chat.completions.create(
            model="policy", messages=user(), max_tokens=2, stop="x"
        )
        return completion.choices[0].finish_reason, completion.usage.completion_tokens

    engine = scripted(["abcd"])
    t = one(chat, engine, agent, stop_strings=["y"])
    assert t.output == ("length", 2)
    assert t.stop_reason is StopReason.TURN_LENGTH
    assert engine.requests[0].sampling.stop_strings == ("y", "x")


@pytest.mark.parametrize("content", ["<|im_end|>", [{"type": "text", "text": "<|im_end|>"}]])
def test_control_tokens_in_a_users_message_stay_text(chat, scripted, content):
    async def agent(row, client):
        await ask(client, user(content))

    engine = scripted(["a"])
    one(chat, engine, agent)
    assert engine.requests[0].prompt_ids.count(2) == 1  # the template's own


def test_models_are_listed_and_an_unknown_one_is_refused(chat, scripted):
    async def agent(row, client):
        with pytest.raises(openai.NotFoundError, match="`model` must be 'policy', got 'gpt-4'"):
            await client.chat.completions.create(model="gpt-4", messages=user())
        await ask(client, user())
        return [model.id async for model in client.models.list()]

    assert one(chat, scripted(["a"]), agent).output == ["policy"]


def test_a_stream_says_the_same(chat, scripted):
    async def agent(row, client):
        stream = await client.chat.completions.create(
            model="policy", messages=user(), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        return (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            [c.choices[0].finish_reason for c in chunks if c.choices],
            chunks[-1].usage.completion_tokens,
        )

    assert one(chat, scripted(["hello"]), agent).output == ("hello", [None, "stop"], 6)


# ---- limits that are not the agent's ----


@pytest.mark.parametrize("limits", [{"max_invalid_calls": 2}, {"tool_timeout_s": math.inf}])
def test_limits_of_what_the_agent_does_itself_are_refused(chat, scripted, limits):
    with pytest.raises(ValueError, match=f"`{next(iter(limits))}` must be left out with an agent"):
        one(chat, scripted(["a"]), saying, limits=Limits(**limits))


def test_what_ended_a_trajectory_is_said_to_the_agent_and_counts(chat, scripted):
    async def agent(row, client):
        await ask(client, user())
        with pytest.raises(openai.BadRequestError, match="has ended as max_turns") as caught:
            await ask(client, user("more"))
        assert caught.value.code == "max_turns"
        return "partial"

    t = one(chat, scripted(["a"]), agent, limits=Limits(max_turns=1))
    assert (t.stop_reason, t.output, t.num_turns) == (StopReason.MAX_TURNS, "partial", 1)


def test_turns_of_all_branches_count(chat, scripted):
    async def agent(row, client):
        for text in ("a", "b", "c"):
            await ask(client, user(text))

    t = one(chat, scripted(["x"]), agent, limits=Limits(max_turns=2))
    assert (t.stop_reason, told(chat, t)) == ("max_turns", [["x<|im_end|>"], ["x<|im_end|>"]])


def test_an_engine_that_fails_ends_the_trajectory(chat, scripted):
    script = by_prompt(chat, one=["a"], two=[EngineError("lost")] * 2)
    good, bad = rollout_agent(scripted(script), chat, looping([]), ROWS, seed=1)
    assert (good.stop_reason, bad.stop_reason) == ("answered", "engine_error")
    assert bad.error == "lost"


# ---- faults ----


async def silent(row, client):
    return "nothing"


async def raising(row, client):
    await ask(client, user())
    raise ValueError("bad luck")


async def hanging(row, client):
    await ask(client, user())
    await asyncio.sleep(60)


async def holding(row, client):
    await ask(client, user())
    while True:
        pass


def hanging_thread(row, client):
    saying(row, client)
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    "agent, reason, error, num_turns",
    [
        (silent, "agent_error", "The agent sent no request that could be answered.", 0),
        (raising, "agent_error", "ValueError: bad luck", 1),
        (hanging, "deadline", None, 1),
        (holding, "deadline", None, 1),
        (hanging_thread, "deadline", None, 1),
        (["false"], "agent_error", "false ended with code 1. It wrote no error.", 0),
        (["sleep", "60"], "deadline", None, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_agent_that_fails_ends_its_own_trajectory(
    chat, scripted, agent, reason, error, num_turns
):
    start = time.monotonic()
    limits = Limits(deadline_s=1.0 if reason == "deadline" else None)
    t = one(chat, scripted(["a"]), agent, limits=limits)
    assert (t.stop_reason, t.error, t.num_turns) == (reason, error, num_turns)
    assert time.monotonic() - start < 8
    assert one(chat, scripted(["a"]), looping([])).output == "a"  # nothing is left behind


def test_a_command_that_cannot_be_started_is_its_own_trouble(chat, scripted):
    t = one(chat, scripted(["a"]), ["no-such-program"])
    assert t.stop_reason is StopReason.AGENT_ERROR
    assert t.error.startswith("no-such-program can't be started")


def test_what_is_no_agent_is_refused(chat, scripted):
    for wrong in ("python agent.py", [], 3, ["python", 3]):
        with pytest.raises(TypeError, match="`agent` must be a function of a row and a client"):
            one(chat, scripted(["a"]), wrong)


COMMAND = """
import json, os, subprocess, sys, urllib.request
row = json.load(sys.stdin)
subprocess.Popen(["sleep", "600"])  # leaks, and holds the pipes
body = {"model": os.environ["OPENAI_MODEL"], "messages": row["prompt"]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def test_a_command_gets_the_row_and_what_it_prints_is_its_output(chat, scripted):
    t = one(chat, scripted(["hello"]), [sys.executable, "-c", COMMAND])
    assert (t.stop_reason, t.output, t.error) == ("answered", "hello", None)


TRAINER = """
import sys
from fakes import chatml_tokenizer
from agent_vllm.chat import ChatFormat
from agent_vllm.gateway import rollout_agent
from agent_vllm.testing import ScriptedRolloutEngine
tokenizer = chatml_tokenizer()
chat = ChatFormat.from_tokenizer(tokenizer)
rollout_agent(ScriptedRolloutEngine(tokenizer, ["a"]), chat, sys.argv[1:], [{}])
"""


@pytest.mark.e2e
def test_a_command_ends_with_a_trainer_that_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$ > {pid_file}; exec sleep 600"]
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, *command], cwd=TESTS)
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text().strip(), 60)
    finally:
        trainer.kill()
        trainer.wait()
    status = Path("/proc", pid_file.read_text().strip(), "status")
    wait_for(lambda: not status.exists() or "State:\tZ" in status.read_text(), 10)


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_client_that_sends_garbage_or_much_gets_an_error_and_others_go_on(chat, scripted):
    statuses = {}

    async def agent(row, client):
        url, headers = f"{client.base_url}chat/completions", client.auth_headers
        foreign = {"Authorization": "Bearer sk-1"}
        big = json.dumps({"model": "policy", "messages": user("x" * 10_000_000)})
        async with aiohttp.ClientSession() as session:
            for name, data, sent in [
                ("garbage", "{not json", headers),
                ("big", big, headers),
                ("foreign", big, foreign),
                ("none", "{}", {}),
            ]:
                async with session.post(url, data=data, headers=sent) as response:
                    body = await response.json()
                    statuses[name] = response.status, body["error"]["type"]
            async with session.get(f"{client.base_url}nowhere", headers=headers) as response:
                statuses["nowhere"] = response.status, (await response.json())["error"]["type"]
        await ask(client, user())

    engine = scripted(["a"])
    assert one(chat, engine, agent).error is None
    kind = "invalid_request_error"
    assert statuses == {
        "garbage": (400, kind), "big": (413, kind), "foreign": (401, kind), "none": (401, kind),
        "nowhere": (404, kind),
    }  # fmt: skip
    assert len(engine.requests) == 1


def test_the_key_of_a_finished_run_gets_401(chat, scripted):
    clients = []

    async def agent(row, client):
        if clients:
            stale = client.with_options(api_key=clients[0])
            with pytest.raises(openai.AuthenticationError):
                await ask(stale, user("late"))
        reply = await ask(client, user())
        clients.append(client.api_key)
        return reply["content"]

    async def both(row, client):  # one after the other, in one rollout
        while row["number"] > len(clients):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1 * row["number"])
        return await agent(row, client)

    rows = [{"number": 0}, {"number": 1}]
    first, second = rollout_agent(scripted(["a"]), chat, both, rows, seed=1)
    assert (first.output, second.output, second.error) == ("a", "a", None)
    assert first.num_turns == second.num_turns == 1


def test_256_sessions_at_once_are_told_apart(chat, scripted):
    rows = [{"prompt": user(str(number))} for number in range(256)]
    script = by_prompt(chat, **{str(n): [f"is {n}"] for n in range(256)})
    trajectories = rollout_agent(scripted(script), chat, looping([]), rows, seed=1)
    assert [t.output for t in trajectories] == [f"is {n}" for n in range(256)]
    assert all(t.branches == [] and t.num_turns == 1 for t in trajectories)


class SlowEngine(ScriptedRolloutEngine):
    async def _sample(self, request):
        await asyncio.sleep(0.2)
        return await super()._sample(request)


def test_what_was_sampled_for_a_client_that_left_is_in_the_trajectory(chat, tokenizer):
    async def agent(row, client):
        with pytest.raises(openai.APITimeoutError):
            await ask(client.with_options(timeout=0.05, max_retries=0), user("first"))
        await ask(client, user("second"))

    t = one(chat, SlowEngine(tokenizer, ["a", "b"]), agent)
    assert told(chat, t) == [["b<|im_end|>"], ["a<|im_end|>"]]


def test_requests_that_nobody_waits_for_end_with_the_run(chat, tokenizer):
    async def agent(row, client):
        asyncio.get_running_loop().create_task(ask(client, user("left behind")))
        await asyncio.sleep(0.1)

    t = one(chat, SlowEngine(tokenizer, ["a"]), agent)
    assert (t.stop_reason, t.num_turns) == (StopReason.AGENT_ERROR, 0)
