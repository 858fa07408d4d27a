"""Turn conversations into token ids, and sampled ids back into messages and calls.

`format` is the hot path, `text` is for where nothing can be called, `codec` encodes and decodes,
`template` renders, `probe` learns from a template when a format is built, `parsing` reads assistant
turns, `tool_check` finds the tools that can't be called. Invariant: what was sampled is never
decoded and encoded again.
"""

from agent_vllm.chat.codec import num_common
from agent_vllm.chat.format import ChatFormat
from agent_vllm.chat.parsing import (
    ResponseParser,
    ResponseTemplateParser,
    SampledTurn,
    named_parser,
    parse_hermes,
    parse_pythonic,
    response_templates,
)
from agent_vllm.chat.template import ChatTemplate
from agent_vllm.chat.text import TEXT_ROLE, DecodedChatFormat, TextFormat
from agent_vllm.chat.tool_check import example_call

__all__ = [
    "TEXT_ROLE",
    "ChatFormat",
    "ChatTemplate",
    "DecodedChatFormat",
    "ResponseParser",
    "ResponseTemplateParser",
    "SampledTurn",
    "TextFormat",
    "example_call",
    "named_parser",
    "num_common",
    "parse_hermes",
    "parse_pythonic",
    "response_templates",
]
