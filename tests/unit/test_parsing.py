"""Assistant turns in the Hermes form: any text gives a value."""

import json

import pytest
from fakes import byte_tokenizer, call, chatml_tokenizer, ids_of

from agent_vllm.chat import ChatFormat, parsing


def parse_hermes(text, starts_in_thinking=False):
    prefix = "<|im_start|>assistant\n<think>\n" if starts_in_thinking else ""
    return parsing.parse_hermes(parsing.SampledTurn(text=text, prefix=prefix))


def wrapped(body):
    return f"<tool_call>\n{body}\n</tool_call>"


def read(text, **options):
    """Name, arguments and error of every call."""
    return [(c.name, c.arguments, c.error) for c in parse_hermes(text, **options).calls]


def errors(text):
    return [error for _, _, error in read(text)]


def test_a_plain_answer():
    assert parse_hermes(" 42\n").message == {"role": "assistant", "content": "42"}


def test_a_call_as_a_message():
    turn = parse_hermes("Let me see." + call("add", a=1))
    function = {"name": "add", "arguments": {"a": 1}}
    assert turn.message == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"type": "function", "function": function}],
    }


def test_content_of_a_turn_with_calls_only_is_empty_text():
    assert parse_hermes(call("add", a=1)).message["content"] == ""


def test_a_call_needs_a_name_and_may_lack_arguments():
    assert read(wrapped('{"arguments": {"a": 3}}')) == [
        ("unknown", None, 'The call has no "name".')
    ]
    assert read(wrapped("{}")) == [("unknown", None, 'The call has no "name".')]
    assert read(wrapped('{"name": "multiply"}')) == [("multiply", None, None)]


@pytest.mark.parametrize("body", ["[]", "3", "null", '"add"', '{"name": 3}', '{"name": ""}'])
def test_other_values_are_calls_without_a_name(body):
    assert errors(wrapped(body)) == ['The call has no "name".']


def test_parallel_calls_are_read_in_order():
    text = call("calc", a=1) + "\n" + call("calc", a=2)
    assert read(text) == [("calc", {"a": 1}, None), ("calc", {"a": 2}, None)]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "calc", "arguments": {"a": 1,}}',
        "{'name': 'calc', 'arguments': {'a': 1}}",
        '{"name": "calc", "arguments": {"a": 1}',
        "",
    ],
)
def test_malformed_json_is_an_error_and_stays_in_content(body):
    turn = parse_hermes(wrapped(body))
    assert [c.error.startswith("The call is not valid JSON: ") for c in turn.calls] == [True]
    assert turn.message == {"role": "assistant", "content": wrapped(body)}


def test_a_good_call_beside_a_bad_one_is_kept():
    turn = parse_hermes(wrapped("nope") + call("calc", a=1))
    assert [c.error is None for c in turn.calls] == [False, True]
    assert len(turn.message["tool_calls"]) == 1


@pytest.mark.parametrize("arguments", ['"{a: 1}"', "[1]", "3", "true"])
def test_unreadable_arguments_are_not_taken_for_none(arguments):
    body = f'{{"name": "calc", "arguments": {arguments}}}'
    assert read(wrapped(body)) == [("calc", None, '"arguments" is not a JSON object.')]


def test_a_type_of_call_other_than_function_is_no_matter():
    body = '{"type": "retrieval", "id": "7", "name": "calc", "arguments": {"a": 1}}'
    assert read(wrapped(body)) == [("calc", {"a": 1}, None)]


def test_arguments_as_a_json_string():
    body = json.dumps({"name": "calc", "arguments": '{"a": 1}'})
    assert read(wrapped(body)) == [("calc", {"a": 1}, None)]


def test_repeated_objects_are_an_error():
    body = '{"name": "calc", "arguments": {}}'
    assert errors(wrapped(body + body)) == [
        "There is text between the call's JSON and its closing tag."
    ]


def test_nested_braces_and_literal_tags_stay_whole():
    arguments = {"q": {"f": {"g": "}"}}, "s": "</tool_call> <think>"}
    assert read(call("calc", **arguments)) == [("calc", arguments, None)]


@pytest.mark.parametrize("special", [False, True])
def test_tags_may_be_special_tokens(special):
    tokenizer = chatml_tokenizer()
    if special:
        tags = ["<tool_call>", "</tool_call>"]
        tokenizer.add_special_tokens({"additional_special_tokens": tags})
    chat = ChatFormat.from_tokenizer(tokenizer)
    turn = chat.parse(ids_of(tokenizer, call("calc", a=1) + "<|im_end|>"))
    assert [(c.name, c.arguments) for c in turn.calls] == [("calc", {"a": 1})]


def test_a_prefilled_thinking_block_is_reasoning():
    turn = parse_hermes("why</think>answer", starts_in_thinking=True)
    assert turn.message == {
        "role": "assistant",
        "content": "answer",
        "reasoning_content": "why",
    }


def test_a_thinking_block_that_never_ends_holds_no_call():
    turn = parse_hermes("why " + call("calc", a=1), starts_in_thinking=True)
    assert turn.calls == []
    assert turn.message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "why " + call("calc", a=1),
    }


def test_the_prompt_says_whether_thinking_has_begun(tokenizer):
    chat = ChatFormat.from_tokenizer(tokenizer)
    turn_ids = ids_of(tokenizer, "why</think>answer")
    begun = chat.parse(turn_ids, ids_of(tokenizer, "<|im_start|>assistant\n<think>\n"))
    ended = chat.parse(turn_ids, ids_of(tokenizer, "<|im_start|>assistant\n<think></think>\n"))
    assert begun.message.get("reasoning_content") == "why"
    assert ended.message == {"role": "assistant", "content": "why</think>answer"}


def test_calls_count_after_the_thinking_block_only():
    text = "<think>maybe " + call("calc", a=1) + "</think>" + call("calc", a=2)
    assert read(text) == [("calc", {"a": 2}, None)]


def test_a_turn_cut_inside_a_character_is_an_incomplete_call():
    tokenizer = byte_tokenizer()
    chat = ChatFormat.from_tokenizer(tokenizer)
    whole = ids_of(tokenizer, '<tool_call>{"name": "f", "arguments": {"s": "')
    first_byte = ids_of(tokenizer, "汉")[:1]
    turn = chat.parse(whole + first_byte)
    assert [c.error is None for c in turn.calls] == [False]
    assert turn.message["content"].endswith("�")


def test_a_call_that_never_ends():
    body = '{"name": "calc", "arguments": {}}'
    assert errors("<tool_call>" + body) == ["The call has no closing </tool_call>."]


def test_numbers_of_too_many_digits():
    body = f'{{"name": "calc", "arguments": {{"a": {"9" * 5000}}}}}'
    assert errors(wrapped(body)) == ["The call holds a number of too many digits."]


def test_nesting_beyond_the_decoder():
    body = f'{{"name": "calc", "arguments": {{"a": {"[" * 100_000}}}}}'
    assert errors(wrapped(body)) == ["The call is nested too deeply."]


class CountingDecoder:
    def __init__(self):
        self.num_calls = 0

    def raw_decode(self, text):
        self.num_calls += 1
        return json.JSONDecoder().raw_decode(text)


@pytest.mark.parametrize(
    ("unit", "num_decodes"),
    [("<tool_call>", 1), ('<tool_call>{"a', 1), ("<tool_call>x</tool_call>", 50), ("</think>", 0)],
)
def test_hostile_text_is_decoded_once_a_call(monkeypatch, unit, num_decodes):
    decoder = CountingDecoder()
    monkeypatch.setattr("agent_vllm.chat.parsing.hermes._DECODER", decoder)
    parse_hermes(unit * 50)
    assert decoder.num_calls == num_decodes
