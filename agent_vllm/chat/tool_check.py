"""Check, before anything is sampled, that the model can call a tool through its chat template.

Invariant: a tool without a problem gets the arguments that the template wrote, name by name and
value by value, for an example call made from its schema.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_vllm.chat.codec import TokenCodec, num_common
from agent_vllm.chat.template import ChatTemplate
from agent_vllm.errors import ChatTemplateError
from agent_vllm.tools import Tool
from agent_vllm.tools.schema import example_arguments
from agent_vllm.types import ParsedTurn, ToolCall

_USER = {"role": "user", "content": "What is it like in Oslo?"}
_PLAIN_NAME = "lookup"  # one that every family can carry
_TEXT_CHARS = 300


def example_call(tool: Tool) -> ToolCall:
    """Return a call of the tool with an example value for each of its arguments."""
    parameters = tool.schema["function"].get("parameters") or {}
    return ToolCall(name=tool.name, arguments=example_arguments(parameters))


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCheck:
    """Write calls with the template and read them back.

    Attributes:
        parse: `ChatFormat.parse`.
        end_token_ids: ids that end a turn.
    """

    template: ChatTemplate
    codec: TokenCodec
    parse: Callable[..., ParsedTurn]
    end_token_ids: tuple[int, ...]

    def problem(self, tool: Tool) -> str | None:
        """Return why the tool can't be called, and the remedy, or None."""
        call = example_call(tool)
        try:
            found = self._misread(call, tool)
        except ChatTemplateError as error:
            return f"The chat template can't write the tool `{tool.name}`. {error}"
        if found is None:
            return None
        nothing = ToolCall(name=tool.name, arguments={})
        if self._misread(nothing, tool) is None:
            return self._problem_of_arguments(call, tool) or _no_parser(tool.name, found)
        if self._misread(replace(nothing, name=_PLAIN_NAME), tool) is None:
            return (
                f"`{tool.name}` can't be called: with this chat template {found}. Use letters, "
                "digits and underscores in the tool's name."
            )
        return _no_parser(tool.name, found)

    def _problem_of_arguments(self, call: ToolCall, tool: Tool) -> str | None:
        for name, value in (call.arguments or {}).items():
            found = self._misread(ToolCall(name=tool.name, arguments={name: value}), tool)
            if found is not None:
                return (
                    f"The argument {name!r} of `{tool.name}` can't be given: with this chat "
                    f"template {found}. Rename the argument, or give it a simpler type."
                )
        return None

    def written(self, calls: Sequence[ToolCall], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the ids of a turn as the template writes it, with its end; no calls: an answer.

        Raises:
            ChatTemplateError: the template refuses the turn.
        """
        return self._turn(calls, tools)[1]

    def _turn(
        self, calls: Sequence[ToolCall], tools: Sequence[Tool]
    ) -> tuple[list[int], list[int]]:
        """Return the ids before the turn and those of the turn."""
        message: dict[str, Any] = {"role": "assistant", "content": "" if calls else "It is noon."}
        if calls:
            message["tool_calls"] = [call.as_message() for call in calls]
        render, encode = self.template.render, self.codec.encode
        prompt = encode(render([_USER], tools, add_generation_prompt=True))
        whole = encode(render([_USER, message], tools, add_generation_prompt=False))
        start = num_common(prompt, whole)  # a prompt may open a block that the turn shows empty
        ends = [i for i, id_ in enumerate(whole) if id_ in self.end_token_ids and i >= start]
        turn = whole[start : ends[-1] + 1] if ends else [*whole[start:], self.end_token_ids[0]]
        return whole[:start], turn

    def _misread(self, call: ToolCall, tool: Tool) -> str | None:
        """Return what is written for this call and how it is read; None if it is read as meant."""
        prompt, turn = self._turn([call], [tool])
        read = self.parse(turn, prompt, [tool]).calls
        if [_as_json(each) for each in read] == [_as_json(call)]:
            return None
        text = self.codec.decode(turn)[:_TEXT_CHARS]
        shown = [each.error or f"{each.name}({each.arguments})" for each in read]
        return f"its call is written as {text!r} and read as {' and '.join(shown) or 'no call'}"


def _no_parser(name: str, found: str) -> str:
    return (
        f"`{name}` can't be called: with this chat template {found}. Give a `parser` that reads "
        "its calls."
    )


def _as_json(call: ToolCall) -> str:
    """Return name and arguments as text, in which 1, 1.0 and true differ."""
    return json.dumps([call.name, call.arguments or {}, call.error], sort_keys=True)
