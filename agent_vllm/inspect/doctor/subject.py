"""Hold what the doctor examines: a model, its tokenizer, tools, prompts and turns made from them.

Invariant: the tools are never run; stand-ins return a fixed result.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.chat import ChatFormat, ResponseParser, num_common
from agent_vllm.rollout import rollout_single
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.tools import Tool, tools_by_name, tools_in_file
from agent_vllm.types import Messages, ToolCall, Trajectory

Tools = Sequence[Tool | Callable[..., Any]]
STAND_IN_RESULT = "42"
USER = {"role": "user", "content": "What is it like in Oslo?"}
_EXAMPLES = {"string": "Oslo", "integer": 3, "number": 2.5, "boolean": True, "array": []}


@dataclass(kw_only=True)
class SubjectState:
    """The model, tokenizer, tools and prompts under examination; checks fill in the rest."""

    source: PreTrainedModel | str | Path
    given_tokenizer: PreTrainedTokenizerBase | None
    tool_source: Tools | str | Path
    prompts: list[Messages]
    parser: ResponseParser | str | None
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    tools: list[Tool] = field(init=False)  # with stand-ins for their functions
    chat: ChatFormat = field(init=False)

    @functools.cached_property
    def call(self) -> ToolCall:
        return example_call(self.tools[0])

    @functools.cached_property
    def story(self) -> Trajectory:
        """A trajectory of a call, its result and an answer, as the template writes them."""
        return self.play([self.written([self.call]), self.written([])])[0]

    def play(self, turns: list[list[int]]) -> tuple[Trajectory, list[list[int]]]:
        """Return a rollout of these turns, and the prompts that the engine got."""
        engine = ScriptedRolloutEngine(self.tokenizer, turns, max_model_len=1 << 20)
        trajectory = rollout_single(engine, self.chat, self.prompts[0], self.tools)
        return trajectory, [request.prompt_ids for request in engine.requests]

    def written(self, calls: Sequence[ToolCall]) -> list[int]:
        """Return the ids of an assistant turn as the template writes it, end token included."""
        turn: dict[str, Any] = {"role": "assistant", "content": "" if calls else "It is noon."}
        if calls:
            turn["tool_calls"] = [call.as_message() for call in calls]
        render = self.chat.template.render
        prompt = self.encode(render([USER], add_generation_prompt=True))
        whole = self.encode(render([USER, turn], add_generation_prompt=False))
        start = num_common(prompt, whole)  # a prompt may open a block that the turn shows empty
        ends = [i for i, id_ in enumerate(whole) if id_ in self.chat.end_token_ids and i >= start]
        if ends:
            return whole[start : ends[-1] + 1]
        return [*whole[start:], self.chat.end_token_ids[0]]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cast(str, text)


def load_tools(source: Tools | str | Path) -> list[Tool]:
    """Load tools given as objects, or every public function and `Tool` of a Python file, in order.

    Raises:
        ToolDefinitionError: one of them can't be described to the model.
        ValueError: there is no tool.
        Exception: whatever the file raises when it is imported.
    """
    if isinstance(source, str | Path):
        source = tools_in_file(Path(source))
    tools = list(tools_by_name(source).values())
    if not tools:
        raise ValueError("There must be at least one tool, got none.")
    return tools


def example_call(tool: Tool) -> ToolCall:
    """Return a call of the tool with an example value for each of its parameters."""
    properties = (tool.schema["function"].get("parameters") or {}).get("properties", {})
    arguments = {name: _example_value(schema) for name, schema in properties.items()}
    return ToolCall(name=tool.name, arguments=arguments)


def _example_value(schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = next(iter(kind), "string") if isinstance(kind, list) else kind
    if kind == "object":
        return {name: _example_value(s) for name, s in schema.get("properties", {}).items()}
    return _EXAMPLES.get(kind, "Oslo")
