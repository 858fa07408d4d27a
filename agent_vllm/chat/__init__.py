"""Turn conversations into token ids, and sampled ids back into messages and calls.

`format` is the hot path, `template` renders, `probe` learns from a template when a format is built,
`parsing` reads assistant turns. Invariant: what was sampled is never decoded and encoded again.
"""

from agent_vllm.chat.format import ChatFormat, num_common
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

__all__ = [
    "ChatFormat",
    "ChatTemplate",
    "ResponseParser",
    "ResponseTemplateParser",
    "SampledTurn",
    "named_parser",
    "num_common",
    "parse_hermes",
    "parse_pythonic",
    "response_templates",
]
