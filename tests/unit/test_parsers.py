"""Forms of calls other than Hermes: LFM2's Python lists, tags, loose JSON, gpt-oss's channels."""

import json

import pytest
from families import TOOLS

from agent_vllm.chat import SampledTurn, named_parser, parse_pythonic

SCHEMAS = [tool.schema for tool in TOOLS]


def read(parser, text, **turn):
    """Name, arguments and error of every call."""
    parse = named_parser(parser, None)
    parsed = parse(SampledTurn(text=text, tools=SCHEMAS, **turn))
    return [(call.name, call.arguments, call.error) for call in parsed.calls]


# ---- Python lists ----


def pythonic(body):
    return f"<|tool_call_start|>{body}<|tool_call_end|>"


def test_a_python_list_of_calls():
    text = pythonic("[f(a='it\\'s, (x)]', b=[1, -2.5, None, {\"c\": true}]), g.h()]")
    assert read("lfm2", text) == [
        ("f", {"a": "it's, (x)]", "b": [1, -2.5, None, {"c": True}]}, None),
        ("g.h", {}, None),
    ]


def test_a_message_in_lfm2s_keys():
    text = f"<think>hm</think>So: {pythonic('[f(a=1)]')}"
    turn = parse_pythonic(SampledTurn(text=text))
    function = {"name": "f", "arguments": {"a": 1}}
    assert turn.message == {
        "role": "assistant",
        "content": "So:",
        "thinking": "hm",
        "tool_calls": [{"type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("[f(a=1]", "does not match"),
        ("f(a=1)", "must be a list"),
        ("[]", "must be a list"),
        ("[f(1)]", "every argument named"),
        ("[f(a=1, a=2)]", "no name of its own"),
        ("[f(**{'a': 1})]", "no name of its own"),
        ("[f(a=print)]", "malformed node"),
        ("[f(a={1: 2})]", "keys must be strings"),
        ("[f(a={1, 2})]", "of type set"),
        ("[f(a=b'x')]", "of type bytes"),
        ("[f(a=2j)]", "of type complex"),
        (f"[f(a=0x1{'0' * 4000})]", "too many digits"),
        (f"[f(a={'9' * 5000})]", "could not be read"),
        ("[f(a=" + "[" * 5000 + ")]", "could not be read"),
        ("[f(a='" + "x" * 200_000 + "')]", "more than 100000 characters"),
    ],
)
def test_what_is_no_list_of_calls_is_one_error(body, error):
    [(name, arguments, problem)] = read("lfm2", pythonic(body))
    assert (name, arguments) == ("unknown", None)
    assert error in problem


def test_nothing_is_evaluated():
    [(_, _, error)] = read("lfm2", pythonic("[f(a=__import__('os').getpid())]"))
    assert "malformed node" in error


def test_calls_without_a_closing_mark():
    assert read("lfm2", "<|tool_call_start|>[f()]") == [
        ("unknown", None, "The calls have no closing <|tool_call_end|>.")
    ]


# ---- tags ----


def tagged(value, key="text"):
    return (
        f"<tool_call>\n<function=record>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>"
    )


@pytest.mark.parametrize("text", ["  indented\n", "a\n\nb", "\n", "", "75001", "None", "null"])
def test_text_in_tags_is_kept_to_the_space(text):
    assert read("qwen3_5", tagged(text)) == [("record", {"text": text}, None)]


@pytest.mark.parametrize(
    "body",
    [
        "<parameter=text>\na </parameter> b\n</parameter>\n</function>",
        "<parameter>\na\n</parameter>\n</function>",
        "<parameter=text a</parameter>\n</function>",
        f"<parameter={'x' * 300}>\na\n</parameter>\n</function>",
        '{"text": "a"}\n</function>',
    ],
)
def test_text_that_is_no_argument_is_an_error_and_not_left_out(body):
    [(_, arguments, error)] = read(
        "qwen3_5", f"<tool_call>\n<function=record>\n{body}\n</tool_call>"
    )
    assert arguments is None
    assert "argument" in error


def test_a_call_in_tags_that_never_ends():
    [(_, _, error)] = read("qwen3_5", tagged("a").removesuffix("</tool_call>") + "So.")
    assert "there is text that is no argument" in error


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "3", 3),
        ("flag", "True", True),
        ("flag", "false", False),
        ("maybe", "None", None),
        ("maybe", "null", None),
        ("nested", '{"a": [1]}', {"a": [1]}),
        ("count", "three", "three"),  # the schema says what is wrong
    ],
)
def test_values_in_tags_have_the_schemas_type(key, text, value):
    assert read("qwen3_5", tagged(text, key)) == [("record", {key: value}, None)]


# ---- loose JSON ----


def test_loose_json():
    body = '{a:<|"|>x: {y, "z"}<|"|>,b:{c:[None,true,-1.5]},<|"|>d e<|"|>:1}'
    assert read("gemma4", f"<|tool_call>call:f{body}<tool_call|>") == [
        ("f", {"a": 'x: {y, "z"}', "b": {"c": [None, True, -1.5]}, "d e": 1}, None)
    ]


@pytest.mark.parametrize(
    "call", ['f{a:<|"|>x}<tool_call|>', "f{a:1}", "f{a:}<tool_call|>", "f[1<tool_call|>"]
)
def test_loose_json_that_is_malformed(call):
    [(_, arguments, error)] = read("gemma4", f"<|tool_call>call:{call}")
    assert arguments is None
    assert error is not None


# ---- channels ----


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>analysis to=functions.f code<|message|>",
    ],
)
def test_gptoss_writes_recipient_and_channel_in_either_order(header):
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + header + '{"a": 1}'
    calls = read("gptoss", text, prefix="<|start|>assistant", end="<|call|>")
    assert calls == [("f", {"a": 1}, None)]


def test_text_without_any_mark_is_content():
    for name in ("gptoss", "muse_glimmer", "cohere_command3"):
        turn = named_parser(name, None)(SampledTurn(text="plain <words>"))
        assert turn.message == {"role": "assistant", "content": "plain <words>"}, name


def test_every_message_can_be_written_as_json():
    turn = parse_pythonic(SampledTurn(text=pythonic("[f(a=1e999, b='\\ud83d')]")))
    assert json.loads(json.dumps(turn.message)) == turn.message
