"""Assistant turns as text to messages and calls. One module a way of reading; chosen here.

Invariant: whatever a model writes is a `ParsedTurn`. A call that can't be read is a call with an
error, in its place among the others.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from agent_vllm.chat.parsing.hermes import parse_hermes
from agent_vllm.chat.parsing.own_templates import OWN_TEMPLATES
from agent_vllm.chat.parsing.pythonic import parse_pythonic
from agent_vllm.chat.parsing.response_template import ResponseTemplateParser
from agent_vllm.chat.parsing.turn import ResponseParser, SampledTurn
from agent_vllm.chat.parsing.vllm_parsers import VLLMToolParser, vllm_parser_names
from agent_vllm.types import ParsedTurn, ToolCall

__all__ = [
    "ResponseParser",
    "ResponseTemplateParser",
    "SampledTurn",
    "VLLMToolParser",
    "find_parser",
    "named_parser",
    "parse_hermes",
    "parse_pythonic",
    "response_templates",
    "safely",
]

_VLLM_PARSER_BY_MARK = {"[TOOL_CALLS]": "mistral"}
_OWN_PARSERS: dict[str, ResponseParser] = {"hermes": parse_hermes, "lfm2": parse_pythonic}


def named_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> ResponseParser:
    """A parser by name: "hermes", "lfm2", a family with a response template, or one of vLLM's.

    Raises:
        ValueError: nobody knows the name; lists those that are known.
    """
    if name in _OWN_PARSERS:
        return _OWN_PARSERS[name]
    templates = response_templates()
    if name in templates:
        return ResponseTemplateParser(templates[name])
    vllm_names = vllm_parser_names()
    if name in vllm_names:
        return VLLMToolParser(name, tokenizer)
    known = ", ".join([*_OWN_PARSERS, *templates])
    if vllm_names:
        known += f"; from vLLM {', '.join(vllm_names)}"
    raise ValueError(f"`parser` must be a callable or a known name, got {name!r}. Known: {known}.")


def find_parser(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str,
    reads: Callable[[ResponseParser], bool],
    is_better: Callable[[ResponseParser], bool],
) -> ResponseParser | None:
    """The first parser that `reads` a call as this chat template writes it, and `is_better`.

    The first that reads one where none is better; None where none reads one.
    """
    reading = filter(reads, map(safely, _candidates(tokenizer, chat_template)))
    found = []
    for parser in reading:
        if is_better(parser):
            return parser
        found.append(parser)
    return found[0] if found else None


def safely(parser: ResponseParser) -> ResponseParser:
    """The parser, with whatever it raises turned into a call's error."""

    @functools.wraps(parser, updated=())
    def parse(turn: SampledTurn) -> ParsedTurn:
        try:
            parsed = parser(turn)
            if isinstance(parsed, ParsedTurn):
                return parsed
            problem = f"it returned {type(parsed).__name__}, not a ParsedTurn"
        except Exception as error:  # a parser of the user's may raise anything
            problem = f"{type(error).__name__}: {error}"
        call = ToolCall(
            name="unknown", arguments=None, error=f"The turn could not be read: {problem}."
        )
        return ParsedTurn(message={"role": "assistant", "content": turn.text}, calls=[call])

    return parse


def _candidates(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> Iterator[ResponseParser]:
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        yield ResponseTemplateParser(own)
    yield from _OWN_PARSERS.values()
    for template in response_templates().values():
        yield ResponseTemplateParser(template)
    names = [name for mark, name in _VLLM_PARSER_BY_MARK.items() if mark in chat_template]
    known = vllm_parser_names() if names else []
    yield from (VLLMToolParser(name, tokenizer) for name in names if name in known)


def response_templates() -> dict[str, Mapping[str, Any]]:
    """Response templates by family: ours, and TRL's as `trl.chat_template_utils` names them."""
    from trl import chat_template_utils

    found = {
        name.removesuffix("_template"): value
        for name, value in vars(chat_template_utils).items()
        if name.endswith("_template") and isinstance(value, dict)
    }
    found |= OWN_TEMPLATES
    return {name: value for name, value in found.items() if "tool_calls" in value["fields"]}
