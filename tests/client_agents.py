"""Agents as people write them, with the OpenAI client, and the tokens of what they sampled."""

import json

from agent_vllm.gateway import MODEL
from agent_vllm.tools import as_tool


def schemas(tools):
    return [dict(as_tool(tool).schema) for tool in tools]


async def ask(client, messages, **fields):
    """Return the reply as a message, as clients keep it."""
    completion = await client.chat.completions.create(model=MODEL, messages=messages, **fields)
    return completion.choices[0].message.model_dump(exclude_none=True)


def results(reply, tools):
    """Run the reply's calls."""
    named = {tool.__name__: tool for tool in tools}
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": str(
                named[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
            ),
        }
        for call in reply.get("tool_calls", [])
    ]


def looping(tools, run=None, **fields):
    """The usual loop: ask, run the calls, show their results, until there are none.

    `run` are functions in place of the tools that are offered.
    """
    fields |= {"tools": schemas(tools)} if tools else {}

    async def agent(row, client):
        messages = [dict(message) for message in row["prompt"]]
        while True:
            reply = await ask(client, messages, **fields)
            messages += [reply, *(shown := results(reply, run or tools))]
            if not shown:
                return reply.get("content", "")

    return agent


def forgiving(tool):
    """Answer a call that fails as our loop does, in the text that the tool raised."""

    def call(**arguments):
        try:
            return tool(**arguments)
        except (TypeError, ValueError) as error:
            return str(error)

    call.__name__ = tool.__name__
    return call


def told(chat, trajectory):
    """What was sampled: of the conversation and of each branch, its turns in order."""
    return [turns(chat, t) for t in (trajectory, *trajectory.branches)]


def turns(chat, trajectory):
    return [chat.tokenizer.decode(turn.segment.token_ids) for turn in trajectory.turns]
