"""Agents of other frameworks, unmodified: which of them continue with the ids that were sampled."""

import pytest
from client_agents import told
from fakes import ADD, add, call, user

from agent_vllm.gateway import MODEL, rollout_agent

E = "<|im_end|>"


def rolled_out(chat, engine, agent):
    [trajectory] = rollout_agent(engine, chat, agent, [{"prompt": user("What is 1 + 2?")}], seed=1)
    assert trajectory.error is None
    return trajectory


@pytest.mark.parametrize("turns", [["3"], [ADD, "3"], [f"{ADD}\n{ADD}", ADD, "3"]], ids=len)
def test_an_agent_of_the_openai_agents_sdk_is_linear(chat, scripted, turns):
    sdk = pytest.importorskip("agents")

    async def agent(row, client):
        model = sdk.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        agent = sdk.Agent(
            name="adder", instructions="Be brief.", model=model, tools=[sdk.function_tool(add)]
        )
        config = sdk.RunConfig(tracing_disabled=True)
        result = await sdk.Runner.run(agent, row["prompt"][0]["content"], run_config=config)
        return result.final_output

    t = rolled_out(chat, scripted(turns), agent)
    assert t.output == "3"
    assert told(chat, t) == [[turn + E for turn in turns]]
    assert [r.content for r in t.tool_results] == ["3"] * sum(turn.count(ADD) for turn in turns)


def test_a_code_agent_of_smolagents_rewrites_its_history(chat, scripted):
    """It adds its calls to what the model said, so each of its turns is a branch."""
    smolagents = pytest.importorskip("smolagents")

    def agent(row, client):
        model = smolagents.OpenAIModel(MODEL, api_base=str(client.base_url), api_key=client.api_key)
        agent = smolagents.CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0)
        return agent.run(row["prompt"][0]["content"])

    first = "I add.\n<code>\nthree = 1 + 2\nprint(three)\n</code>"
    last = "I answer.\n<code>\nfinal_answer(three)\n</code>"
    engine = scripted([first, last], max_model_len=40_000)
    t = rolled_out(chat, engine, agent)
    assert t.output == 3
    assert told(chat, t) == [[last + E], [first + E]]
    assert "Calling tools" in t.messages[2]["content"][0]["text"]


def test_a_tool_calling_agent_of_smolagents_rewrites_its_history(chat, scripted):
    """It keeps its calls as text, so each of its turns is a branch."""
    smolagents = pytest.importorskip("smolagents")

    class Add(smolagents.Tool):
        name, description, output_type = "add", "Add.", "integer"
        inputs = {  # noqa: RUF012
            "a": {"type": "integer", "description": "first"},
            "b": {"type": "integer", "description": "second"},
        }

        def forward(self, a, b):
            return add(a, b)

    def agent(row, client):
        model = smolagents.OpenAIModel(
            MODEL, api_base=str(client.base_url), api_key=client.api_key, tool_choice="auto"
        )
        agent = smolagents.ToolCallingAgent(
            tools=[Add()], model=model, max_steps=3, verbosity_level=0
        )
        return agent.run(row["prompt"][0]["content"])

    last = call("final_answer", answer="3")
    engine = scripted([ADD, last], max_model_len=40_000)
    t = rolled_out(chat, engine, agent)
    assert t.output == "3"
    assert told(chat, t) == [[last + E], [ADD + E]]
