"""Conversations as tables and the OpenAI API store them, written as they were before."""

import json

import pytest
from datasets import Dataset
from families import accepted, chat_of

PLAIN = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "What is it?"},
]


def calling(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


WITH_CALLS = [
    {"role": "user", "content": "What is it?"},
    calling("record", text="a", where={"city": "Oslo"}),
    {"role": "tool", "name": "record", "content": "ok"},
    calling("note", count=3),
    {"role": "tool", "name": "note", "content": "ok"},
    {"role": "user", "content": "Go on."},
]


@pytest.fixture(scope="module")
def stored():
    return Dataset.from_list([{"prompt": PLAIN}, {"prompt": WITH_CALLS}])["prompt"]


@pytest.mark.parametrize("name", accepted())
def test_a_stored_conversation_is_written_as_before(name, stored):
    chat = chat_of(name)
    assert stored[0][0]["tool_calls"] is None  # what a table adds
    for before, after in zip([PLAIN, WITH_CALLS], stored, strict=True):
        assert chat.prompt_ids(after) == chat.prompt_ids(before)


def change_calls(change):
    return [
        {**m, **change(m["tool_calls"][0]["function"])} if "tool_calls" in m else m
        for m in WITH_CALLS
    ]


def test_arguments_may_be_text_and_content_parts_or_none(chat):
    def openais(function):
        text = json.dumps(function["arguments"])
        call = {"type": "function", "function": {**function, "arguments": text}}
        return {"content": None, "tool_calls": [call]}

    expected = chat.prompt_ids(WITH_CALLS)
    assert chat.prompt_ids(change_calls(openais)) == expected
    parts = [{"type": "text", "text": "Go on.", "image": None}]
    assert chat.prompt_ids([*WITH_CALLS[:-1], {"role": "user", "content": parts}]) == expected


def test_a_none_that_the_caller_wrote_stays(chat):
    messages = [PLAIN[0], calling("record", text=None), *WITH_CALLS[2:3]]
    assert '"text": null' in chat.codec.decode(chat.prompt_ids(messages))
