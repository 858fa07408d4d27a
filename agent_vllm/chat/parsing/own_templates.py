"""Response templates for families that TRL has none for, or one that reads less than models write.

Data for `ResponseTemplateParser`; the form is transformers' own. Patterns have bounds where a flood
of half a mark would otherwise be looked at over and over.
"""

from typing import Any

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

OWN_TEMPLATES: dict[str, dict[str, Any]] = {
    # TRL's reads the order in which the template writes a call, `to=` before the channel. Models
    # also write the channel first and `<|constrain|>json`
    # (https://github.com/openai/harmony/blob/main/docs/format.md).
    "gptoss": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {
                "open": "<|channel|>analysis<|message|>",
                "close_pattern": r"<\|end\|>\s*",
            },
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
                "close_pattern": r"<\|(?:return|end)\|>\s*",
            },
            "tool_calls": {
                "open_pattern": r"to=functions\.(?P<name>[^\s<]{1,256}+)(?:<\|channel\|>\w{1,16})?"
                r"\s*+(?:<\|constrain\|>)?\w{0,16}\s*+<\|message\|>",
                "close_pattern": r"<\|call\|>\s*",
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
        },
    },
    "deepseek_v3": {
        "start_anchor": "<｜Assistant｜>",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
            "tool_calls": {
                "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>function"
                r"<｜tool▁sep｜>(?P<name>[^\n<]{1,256}+)\n```json\n",
                "close_pattern": r"\n```<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?\s*",
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
            "content": {"close_pattern": r"<｜end▁of▁sentence｜>\s*"},
        },
    },
    "cohere_command3": {
        "start_anchor": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "fields": {
            "reasoning_content": {
                "open": "<|START_THINKING|>",
                "close_pattern": r"<\|END_THINKING\|>\s*",
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|START_ACTION\|>\s*\[|,)\s*\{"
                r'(?:\s*"tool_call_id":\s*"[^"]*",)?\s*'
                r'"tool_name":\s*"(?P<name>[^"\n]+)",\s*"parameters":\s*',
                "close_pattern": r'\}\s*(?:\]\s*<\|END_ACTION\|>|$|(?=,\s*\{\s*"tool_))',
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
            "content": {
                "open": "<|START_RESPONSE|>",
                "close_pattern": r"<\|END_RESPONSE\|>|<\|END_OF_TURN_TOKEN\|>",
            },
        },
    },
    "muse_glimmer": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "reasoning_content": {
                "open": " to=self<|message|>",
                "close_pattern": r"<\|eo[mt]\|>(?:<\|start\|>assistant)?",
            },
            "tool_calls": {
                "open_pattern": r" to=[^\s<]{1,256}+<\|message\|>\s*<atem:function_calls>\s*"
                r'<atem:invoke name="(?P<name>[^"\n]+)">',
                "close_pattern": r"</atem:invoke>\s*</atem:function_calls>(?:<\|eom\|>"
                r"<\|start\|>assistant)?",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r'<atem:parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)'
                    r"</atem:parameter>",
                },
                "transform": _CALL,
            },
            "content": {
                "open": " to=user<|message|>",
                "close_pattern": r"<\|eo[mt]\|>(?:<\|start\|>assistant)?",
            },
        },
    },
}
