"""Which conversation a request continues, whatever its client does to the messages."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_vllm.errors import ChatTemplateError
from agent_vllm.gateway.history import History

USER = {"role": "user", "content": "What is 1 + 2?"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
THINKING = {"role": "assistant", "content": "It is 3.", "reasoning_content": "1 + 2 = 3"}


def answered(*turns, tools=""):
    """A history of one conversation, in which each assistant message was answered as its number."""
    history, messages = History(), []
    for message in turns:
        if message["role"] == "assistant":
            key = history.find(messages, tools).key
            plain = {k: v for k, v in message.items() if k != "reasoning_content"}
            history.add(key, [[message], [plain]], len(messages))
        messages.append(message)
    return history


def with_call(**function):
    message = copy.deepcopy(CALLING)
    message["tool_calls"][0]["function"] |= function
    return message


@pytest.mark.parametrize(
    "reply",
    [
        CALLING,
        with_call(arguments='{"b":2,"a":1}'),
        with_call(arguments={"a": 1, "b": 2}),
        {**CALLING, "content": ""},
        {**CALLING, "refusal": None, "audio": None, "function_call": None},
        {**CALLING, "tool_calls": [{**CALLING["tool_calls"][0], "id": "toolu_1", "index": 0}]},
        dict(reversed(CALLING.items())),
    ],
)
def test_an_answer_written_in_another_way_is_the_same_answer(reply):
    history = answered(USER, CALLING, RESULT)
    blocks = [{"type": "text", "text": USER["content"]}]
    for first in (USER, {"content": blocks, "role": "user"}):
        place = history.find([first, reply, RESULT])
        assert (place.answered, place.new_messages) == (1, [RESULT])


@pytest.mark.parametrize(
    "reply",
    [
        with_call(arguments='{"a": 1, "b": 3}'),
        with_call(name="multiply"),
        {**CALLING, "content": "I add."},
        {**CALLING, "tool_calls": CALLING["tool_calls"] * 2},
        {"role": "assistant", "content": "3"},
    ],
)
def test_an_edited_answer_is_another_conversation(reply):
    place = answered(USER, CALLING, RESULT).find([USER, reply, RESULT])
    assert (place.answered, len(place.new_messages)) == (None, 3)


def test_thinking_may_be_left_out_but_not_be_edited():
    history = answered(USER, THINKING, USER, CALLING)
    plain = {"role": "assistant", "content": "It is 3."}
    edited = {**THINKING, "reasoning_content": "2 + 1 = 3"}
    found = [history.find([USER, m, USER, CALLING]).answered for m in (THINKING, plain, edited)]
    assert found == [3, 3, None]


def test_other_tools_are_another_conversation():
    history = answered(USER, CALLING, tools="add")
    assert [history.find([USER, CALLING], tools).answered for tools in ("add", "", "sub")] == [
        1, None, None,
    ]  # fmt: skip


def test_the_longest_answered_beginning_counts():
    history = answered(USER, CALLING, RESULT, THINKING, USER, CALLING)
    edited = {**RESULT, "content": "4"}
    place = history.find([USER, CALLING, edited, THINKING])
    assert (place.answered, place.new_messages) == (1, [edited, THINKING])


def test_what_is_no_message_or_no_text_is_refused():
    for wrong in ("hi", {"role": "user", "content": [{"type": "image_url"}]}):
        with pytest.raises(ChatTemplateError):
            History().find([wrong])


MESSAGES = st.lists(st.sampled_from([USER, CALLING, RESULT, THINKING]), max_size=8)


@given(MESSAGES, MESSAGES)
def test_a_conversation_goes_on_from_the_last_answer_that_both_share(known, asked):
    """Equal messages and answers are found by comparing one after another, too."""
    place = answered(*known).find(asked)
    pairs = enumerate(zip(known, asked, strict=False))
    num_shared = next((i for i, (a, b) in pairs if a != b), min(len(known), len(asked)))
    replies = [i for i in range(num_shared) if known[i]["role"] == "assistant"]
    expected = replies[-1] if replies else None
    assert place.answered == expected
    num_known = 0 if expected is None else expected + 1
    said = [json.dumps(message.get("content") or "") for message in asked[num_known:]]
    assert [json.dumps(m.get("content") or "") for m in place.new_messages] == said
