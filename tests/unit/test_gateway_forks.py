"""A corpus of histories: what was sampled is in the trajectory or in one of its branches, once."""

import asyncio
import json

import pytest
from client_agents import ask, looping, results, schemas, told
from fakes import ADD, END, add, call, difference, ids_of, shout, user

from agent_vllm.gateway import rollout_agent

OFFERED = {"tools": schemas([add])}
E = "<|im_end|>"


async def linear(row, client):
    return await looping([add])(row, client)


async def reserialised_arguments(row, client):
    reply = await ask(client, user(), **OFFERED)
    shown = results(reply, [add])
    function = reply["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=2)
    await ask(client, [*user(), reply, *shown], **OFFERED)


async def reordered_keys(row, client):
    reply = await ask(client, user(), **OFFERED)
    shown = [dict(reversed(message.items())) for message in results(reply, [add])]
    reply = json.loads(json.dumps(reply, sort_keys=True))
    await ask(client, [*user(), reply, *shown], **OFFERED)


async def streamed(row, client):
    stream = await client.chat.completions.create(
        model="policy", messages=user(), stream=True, **OFFERED
    )
    async for chunk in stream:
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        reply = delta if "tool_calls" in delta else reply  # noqa: F821
    await ask(client, [*user(), reply, *results(reply, [add])], **OFFERED)


async def two_user_turns(row, client):
    reply = await ask(client, user())
    await ask(client, [*user(), reply, *user("more")])


async def edited_message(row, client):
    reply = await ask(client, user())
    await ask(client, [*user(), {**reply, "content": "edited"}, *user("more")])


async def edited_result(row, client):
    reply = await ask(client, user(), **OFFERED)
    shown = results(reply, [add])
    await ask(client, [*user(), reply, *shown], **OFFERED)
    await ask(client, [*user(), reply, {**shown[0], "content": "4"}], **OFFERED)


async def compaction(row, client):
    first = await ask(client, user())
    second = await ask(client, [*user(), first, *user("more")])
    summary = await ask(client, user("sum up"))
    messages = [*user(f"so far: {summary['content']}"), *user("go on")]
    assert second
    await ask(client, messages)


async def sub_agent(row, client):
    reply = await ask(client, user(), **OFFERED)
    await ask(client, user("sub"))
    await ask(client, [*user(), reply, *results(reply, [add])], **OFFERED)


async def parallel_sub_agents(row, client):
    reply = await ask(client, user(), **OFFERED)
    await asyncio.gather(ask(client, user("left")), ask(client, user("right")))
    await ask(client, [*user(), reply, *results(reply, [add])], **OFFERED)


async def retried_request(row, client):
    reply = await ask(client, user(), **OFFERED)
    shown = results(reply, [add])
    await ask(client, [*user(), reply, *shown], **OFFERED)
    await ask(client, [*user(), reply, *shown], **OFFERED)


async def cancelled_stream(row, client):
    async with await client.chat.completions.create(
        model="policy", messages=user(), stream=True
    ) as stream:
        async for _ in stream:
            break
    await ask(client, user())


async def two_at_once(row, client):
    await asyncio.gather(ask(client, user()), ask(client, user()))


async def other_tools(row, client):
    reply = await ask(client, user(), **OFFERED)
    messages = [*user(), reply, *results(reply, [add])]
    await ask(client, messages, tools=schemas([add, shout]))


async def dropped_thinking(row, client):
    reply = await ask(client, user())
    assert reply.pop("reasoning_content") == "t"
    await ask(client, [*user(), reply, *user("more")])


async def edited_thinking(row, client):
    reply = await ask(client, user())
    await ask(client, [*user(), {**reply, "reasoning_content": "u"}, *user("more")])


async def stop_string_written_back(row, client):
    reply = await ask(client, user(), stop=["</code>"])
    assert reply["content"] == "<code>1"
    await ask(client, [*user(), reply, *user("more")])
    await ask(client, [*user(), {**reply, "content": "<code>1</code>"}, *user("else")])


async def only_some_results(row, client):
    reply = await ask(client, user(), **OFFERED)
    await ask(client, [*user(), reply, *results(reply, [add])[:1]], **OFFERED)


TWICE = f"{ADD}\n{call('add', a=3, b=4)}"
CORPUS = [  # the agent, what the model says in order, and where it must be
    (linear, [ADD, "3"], [[ADD, "3"]]),
    (reserialised_arguments, [ADD, "3"], [[ADD, "3"]]),
    (reordered_keys, [ADD, "3"], [[ADD, "3"]]),
    (streamed, [ADD, "3"], [[ADD, "3"]]),
    (two_user_turns, ["a", "b"], [["a", "b"]]),
    (edited_message, ["a", "b"], [["b"], ["a"]]),
    (edited_result, [ADD, "3", "4"], [[ADD, "4"], ["3"]]),
    (compaction, ["a", "b", "c", "d"], [["d"], ["a", "b"], ["c"]]),
    (sub_agent, [ADD, "s", "3"], [[ADD, "3"], ["s"]]),
    (parallel_sub_agents, [ADD, "s", "s", "3"], [[ADD, "3"], ["s"], ["s"]]),
    (retried_request, [ADD, "x", "y"], [[ADD, "y"], ["x"]]),
    (cancelled_stream, ["x", "y"], [["y"], ["x"]]),
    (two_at_once, ["x", "x"], [["x"], ["x"]]),
    (other_tools, [ADD, "3"], [["3"], [ADD]]),
    (dropped_thinking, ["<think>t</think>a", "b"], [["<think>t</think>a", "b"]]),
    (edited_thinking, ["<think>t</think>a", "b"], [["b"], ["<think>t</think>a"]]),
    (stop_string_written_back, ["<code>1</code>", "b", "c"], [["<code>1</code>", "c"], ["b"]]),
    (only_some_results, [TWICE, "3"], [["3"], [TWICE]]),
]


@pytest.mark.parametrize(
    "agent, turns, expected", CORPUS, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_sampled_token_is_told_once(chat, scripted, agent, turns, expected):
    engine = scripted(turns)
    [trajectory] = rollout_agent(engine, chat, agent, [{"prompt": user()}], seed=1)
    assert trajectory.error is None
    assert told(chat, trajectory) == [[turn + E for turn in part] for part in expected]
    parts = [trajectory, *trajectory.branches]
    asked = sorted(request.prompt_ids for request in engine.requests)
    assert sorted(prompt for part in parts for prompt in prompts(part)) == asked


def prompts(trajectory):
    """The ids before each sampled turn."""
    ids = list(trajectory.prompt_ids)
    for segment in trajectory.segments:
        if segment.is_sampled:
            yield list(ids)
        ids += segment.token_ids


def test_a_branch_begins_with_the_ids_that_it_shares(chat, scripted):
    [t] = rollout_agent(scripted([ADD, "x", "y"]), chat, retried_request, [{}], seed=1)
    [branch] = t.branches
    shown = t.turns[0].suffix.token_ids
    # P a0 E s0 | x E, and y E in the place of x E
    assert (
        difference(branch.prompt_ids, [*t.prompt_ids, *t.turns[0].segment.token_ids, *shown])
        is None
    )
    assert branch.completion_ids == [*ids_of(chat.tokenizer, "x"), END]
    assert [m["content"] for m in branch.completion_messages] == ["x"]
    assert [m["content"] for m in t.completion_messages] == ["", "3", "y"]
