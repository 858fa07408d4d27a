"""vLLM's tool parsers by name, for families that have no response template.

https://docs.vllm.ai/en/latest/features/tool_calling.html. They were written for a server's answers;
here thinking is taken off first, and what one raises is a call's error.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from agent_vllm.chat.parsing.turn import SampledTurn
from agent_vllm.types import ParsedTurn, ToolCall

_THINK, _THINK_END = "<think>", "</think>"


def vllm_parser_names() -> list[str]:
    """Names that vLLM knows; none where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return []
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())


class VLLMToolParser:
    """One of vLLM's tool parsers.

    Args:
        name: as `vllm serve --tool-call-parser` takes it.

    Raises:
        ValueError: vLLM's parser of this name reads a stream only.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        from vllm.tool_parsers import ToolParser, ToolParserManager

        parser = ToolParserManager.get_tool_parser(name)
        if parser.extract_tool_calls is ToolParser.extract_tool_calls:
            raise ValueError(
                f"`parser` must read whole turns, got vLLM's {name!r}, which reads streams only. "
                "Pass a callable."
            )
        self.name = name
        self._tokenizer = tokenizer

    def __call__(self, turn: SampledTurn) -> ParsedTurn:
        reasoning, text = _split_thinking(turn)
        found = self._extract(text, turn.tools)
        calls = [_as_call(call.function) for call in found.tool_calls]
        content = found.content if calls else text
        message: dict[str, Any] = {"role": "assistant", "content": (content or "").strip()}
        if reasoning:
            message["reasoning_content"] = reasoning
        if readable := [call for call in calls if call.error is None]:
            message["tool_calls"] = [call.as_message() for call in readable]
        return ParsedTurn(message=message, calls=calls)

    def _extract(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import (
            ChatCompletionRequest,
            ChatCompletionToolsParam,
        )
        from vllm.tool_parsers import ToolParserManager

        params = [ChatCompletionToolsParam.model_validate(dict(tool)) for tool in tools]
        request = ChatCompletionRequest.model_validate({"messages": [], "tools": params or None})
        parser = ToolParserManager.get_tool_parser(self.name)(self._tokenizer, params)  # type: ignore[arg-type]
        return parser.extract_tool_calls(text, request)


def _split_thinking(turn: SampledTurn) -> tuple[str, str]:
    """Reasoning and the rest; calls drafted while thinking are no calls."""
    text = turn.text
    if not turn.starts_in_thinking:
        before, opened, text = text.partition(_THINK)
        if not opened or before.strip():
            return "", turn.text
    reasoning, _, rest = text.partition(_THINK_END)
    return reasoning.strip(), rest


def _as_call(function: Any) -> ToolCall:
    if not function.name:
        return ToolCall(name="unknown", arguments=None, error="The call has no name.")
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(
            name=function.name, arguments=None, error="The arguments are not a JSON object."
        )
    return ToolCall(name=function.name, arguments=arguments)
