"""Train an agent that you have, as it is: its own loop, its own tools, its own framework.

    python examples/train_any_agent.py                            # a loop on the OpenAI client
    python examples/train_any_agent.py --agent openai-agents

The agents know nothing of training. They get a client that is set up, and ask for the model
`policy`. The tiny agent of `tiny_agent.py` is trained, on the engine in plain PyTorch.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from tiny_agent import tiny_agent_path
from tiny_tasks import SMALL_KINDS, TOOLS, correct_reward, make_tasks
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_vllm.gateway import MODEL
from agent_vllm.tools import as_tool
from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

Row = dict[str, Any]
OFFERED = [dict(as_tool(tool).schema) for tool in TOOLS]


def run_call(name: str, arguments: str) -> str:
    """Run a call; what is wrong with it is its result."""
    named: dict[str, Callable[..., str]] = {tool.__name__: tool for tool in TOOLS}
    try:
        return named[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return json.dumps({"error": str(error)})


# ---- the OpenAI client ----


def openai_loop(row: Row, client: Any) -> str:
    messages = list(row["prompt"])
    while True:
        completion = client.chat.completions.create(model=MODEL, messages=messages, tools=OFFERED)
        reply = completion.choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            return reply.content or ""
        for call in reply.tool_calls:
            result = run_call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


# ---- the OpenAI Agents SDK ----


async def openai_agents(row: Row, client: Any) -> str:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool

    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    agent = Agent(name="shop", model=model, tools=[function_tool(tool) for tool in TOOLS])
    result = await Runner.run(agent, row["prompt"][0]["content"])
    return result.final_output


AGENTS: dict[str, Callable[..., Any]] = {
    "openai": openai_loop,
    "openai-agents": openai_agents,
}


# ---- training ----


def agent_reward(agent_output: list[str | None], answer: list[str], **columns: Any) -> list[float]:
    """Score what the agents returned."""
    texts = [[{"role": "assistant", "content": output or ""}] for output in agent_output]
    return correct_reward(texts, answer)


def train(name: str, max_steps: int, output_dir: str) -> None:
    path = tiny_agent_path("small")
    trainer = AgentGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(path),
        reward_funcs=agent_reward,
        train_dataset=Dataset.from_list(make_tasks("train", 500, kinds=SMALL_KINDS)),
        agent=AGENTS[name],
        rollout_engine="torch",
        args=AgentGRPOConfig(
            output_dir,
            max_steps=max_steps,
            per_device_train_batch_size=32,
            num_generations=8,
            learning_rate=3e-4,
            max_completion_length=120,
            max_turns=4,
            deadline_s=60.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
        ),
    )
    try:
        trainer.train()
    finally:
        trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an agent that you have, as it is.")
    parser.add_argument("--agent", choices=AGENTS, default="openai")
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--output-dir", default="runs/any-agent")
    options = parser.parse_args()
    train(options.agent, options.max_steps, options.output_dir)


if __name__ == "__main__":
    main()
