"""Reads an assistant turn in LFM2's form: calls as a Python list between two marks.

`<|tool_call_start|>[search(query='vLLM', limit=3), now()]<|tool_call_end|>`. The list is parsed by
Python's own grammar and only literals are values; nothing is evaluated. Invariant: any text gives a
`ParsedTurn`, in time linear in its length.
"""

import ast
import re
import warnings
from typing import Any

from agent_vllm.chat.parsing.marked import malformed, read_marked
from agent_vllm.chat.parsing.turn import SampledTurn
from agent_vllm.types import ParsedTurn, ToolCall

_CALLS, _CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"
# To the first closing mark; strings are whole, so that a mark inside one is text.
_BODY = re.compile(
    rf"(?:[^'\"<]++|'(?:[^'\\]++|\\.)*+'|\"(?:[^\"\\]++|\\.)*+\"|<(?!{re.escape(_CALLS_END[1:])}))*+",
    re.DOTALL,
)
_STRING = re.compile(r"'(?:[^'\\]++|\\.)*+'|\"(?:[^\"\\]++|\\.)*+\"", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}  # mappings are written as JSON
_MAX_BITS = 14_000  # Python writes no integer of more than 4300 digits
_MAX_CHARS = 100_000  # more is no call; Python's parser is kept from what it can't bear


def parse_pythonic(turn: SampledTurn) -> ParsedTurn:
    """One assistant turn as a message and its calls.

    The message holds `content` (never None), `thinking` if there was any (the key that LFM2's
    templates read), and `tool_calls`; a list that can't be read stays in `content` as one call with
    an error.
    """
    return read_marked(turn, _CALLS, _read_calls, thinking_key="thinking")


def _read_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    end = _BODY.match(text, start).end()  # type: ignore[union-attr]
    body = text[start:end].strip()
    if not text.startswith(_CALLS_END, end):
        return malformed(text, start, _CALLS_END, f"The calls have no closing {_CALLS_END}.")
    try:
        calls = _calls(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "too deep"
        return malformed(text, start, _CALLS_END, f"The calls could not be read: {reason}.")
    return calls, end + len(_CALLS_END)


def _calls(body: str) -> list[ToolCall]:
    if len(body) > _MAX_CHARS:
        raise ValueError(f"they have more than {_MAX_CHARS} characters")
    one_line = _STRING.sub(lambda string: string.group().replace("\n", "\\n"), body)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of escapes that Python doesn't know
        tree = ast.parse(one_line, mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("they must be a list like [name(key=value)]")
    return [_call(node) for node in tree.elts]


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("each must be name(key=value), with every argument named")
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if None in arguments or len(arguments) < len(node.keywords):
        raise ValueError("an argument has no name of its own")
    return ToolCall(name=ast.unparse(node.func), arguments=arguments)  # type: ignore[arg-type]


def _value(node: ast.expr) -> Any:
    """What a literal stands for, JSON's words for it included."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            named = [ast.literal_eval(key) if key else None for key in keys]
            if not all(isinstance(name, str) for name in named):
                raise ValueError("an object's keys must be strings")
            return dict(zip(named, map(_value, values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError(f"a value can't be of type {type(value).__name__}")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("a number has too many digits")
    return value
