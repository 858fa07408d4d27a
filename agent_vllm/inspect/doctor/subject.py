"""Hold what the doctor examines: a model, its tokenizer, tools, prompts and turns made from them.

Invariant: the tools are never run; stand-ins return a fixed result.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.chat import ChatFormat, ResponseParser, example_call
from agent_vllm.rollout import rollout_single
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.tools import Tool, tools_by_name, tools_in_file
from agent_vllm.types import Messages, ToolCall, Trajectory

Tools = Sequence[Tool | Callable[..., Any]]
STAND_IN_RESULT = "42"
USER = {"role": "user", "content": "What is it like in Oslo?"}


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
        return self.chat.tool_check.written(calls)

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
