"""A simulated user: when it is asked, which ids its message adds, what its troubles do."""

import asyncio
import threading

import pytest
from fakes import ADD, END, add, broken_invariants, by_prompt, chatml_tokenizer, tail, user

from agent_vllm.chat import ChatFormat
from agent_vllm.environments import user_suffix_ids
from agent_vllm.errors import ChatTemplateError
from agent_vllm.rollout import rollout_batch, rollout_single
from agent_vllm.settings import Limits
from agent_vllm.tools import as_tool
from agent_vllm.types import StopReason
from trl_integration.fields import Exclusion, exclusion


def saying(*messages):
    """A user who says these, and notes the conversations that it saw."""
    rest, seen = list(messages), []

    def next_message(conversation):
        seen.append([message["role"] for message in conversation])
        return rest.pop(0) if rest else None

    next_message.seen = seen
    return next_message


def roll(chat, engine, next_message, **options):
    return rollout_single(engine, chat, user(), [add], user=next_message, **options)


def test_the_user_goes_on_after_an_answer(chat, scripted):
    engine, guest = scripted(["hello", ADD, "3", "bye"]), saying("sum", "thanks")
    t = roll(chat, engine, guest)
    assert tail(chat, t) == (
        "hello<|im_end|>\n<|im_start|>user\nsum<|im_end|>\n<|im_start|>assistant\n"
        f"{ADD}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
        "3<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"
        "bye<|im_end|>"
    )
    assert (t.stop_reason, t.num_turns, t.error) == (StopReason.ANSWERED, 4, None)
    assert [m["content"] for m in t.completion_messages if m["role"] == "user"] == [
        "sum",
        "thanks",
    ]
    assert [len(seen) for seen in guest.seen] == [2, 6, 8]
    assert broken_invariants(t, engine.requests) == []


def test_waiting_for_the_user_is_no_tool_time(chat, scripted):
    t = roll(chat, scripted(["hello", ADD, "3"]), saying("sum"))
    assert [(span.kind, span.name) for span in t.spans] == [
        ("model", "turn 0"), ("user", "user"),
        ("model", "turn 1"), ("tool", "add"),
        ("model", "turn 2"), ("user", "user"),
    ]  # fmt: skip
    assert [turn.user_span is not None for turn in t.turns] == [True, False, True]
    assert [len(turn.calls) for turn in t.turns] == [0, 1, 0]


def test_only_sampled_tokens_are_trained(chat, scripted):
    t = roll(chat, scripted(["a", "b"]), saying("u"))
    num_written = len("\n") + len("|user\nu") + len("|\n") + len("|assistant\n")
    # columns:                    a  E    user's message, header   b  E
    assert t.completion_mask == [1, 1] + [0] * num_written + [1, 1]


def test_what_the_prompt_of_the_whole_conversation_would_be(chat, scripted):
    """Ids are those that the template writes for the messages, as the turns were canonical."""
    t = roll(chat, scripted(["a", "b"]), saying("u"))
    whole = chat.prompt_ids(t.messages[:-1], [as_tool(add)])
    assert t.prompt_ids + t.completion_ids[:-2] == whole


def test_another_end_token_is_closed_by_the_templates_own():
    chat = ChatFormat.from_tokenizer(chatml_tokenizer())
    plain = user_suffix_ids(chat, "u", last_token_id=END)
    assert user_suffix_ids(chat, "u", last_token_id=0) == [END, *plain]
    assert chat.tokenizer.decode(plain) == (
        "\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )


def test_async_users_and_users_that_return_a_coroutine(chat, scripted):
    rest = ["u", None, "u", None]

    async def next_message(messages):
        await asyncio.sleep(0)
        return rest.pop(0)

    for said in (next_message, lambda messages: next_message(messages)):
        assert roll(chat, scripted(["a", "b"]), said).num_turns == 2


def test_an_empty_message_is_a_message(chat, scripted):
    t = roll(chat, scripted(["a", "b"]), saying(""))
    assert [m["content"] for m in t.messages] == ["hi", "a", "", "b"]


def test_the_conversation_is_the_users_to_spoil(chat, scripted):
    def spoil(messages):
        messages[0]["content"] = "spoiled"

    assert roll(chat, scripted(["a"]), spoil).messages[0]["content"] == "hi"


# ---- limits ----


def test_a_user_whose_message_nobody_could_answer_is_not_heard(chat, scripted):
    guest = saying("u", "v")
    t = roll(chat, scripted(["a", "b"]), guest, limits=Limits(max_turns=2))
    assert (t.stop_reason, t.messages[-1]["content"]) == (StopReason.MAX_TURNS, "b")
    long = saying("u" * 200)
    t = roll(chat, scripted(["a"]), long, limits=Limits(max_completion_tokens=100))
    assert (t.stop_reason, len(t.completion_ids)) == (StopReason.COMPLETION_BUDGET, 2)
    t = roll(chat, scripted(["a"], max_model_len=300), saying("u" * 300))
    assert (t.stop_reason, len(t.completion_ids)) == (StopReason.CONTEXT_FULL, 2)


def test_user_messages_are_no_tool_rounds(chat, scripted):
    limits = Limits(max_tool_rounds=1)
    t = roll(chat, scripted(["a", ADD, "b", ADD]), saying("u", "v"), limits=limits)
    assert (t.stop_reason, t.num_turns) == (StopReason.MAX_TURNS, 4)


# ---- trouble ----


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ValueError("gone"), "ValueError: gone"),
        (SystemExit(1), "SystemExit: 1"),
        (3, "TypeError: A user must say a string or None, got int."),
        (threading.Event().wait, "Timed out after 0.05 s."),
    ],
)
def test_a_user_in_trouble_ends_its_trajectory_alone(chat, scripted, answer, error):
    def trouble(messages):
        if isinstance(answer, BaseException):
            raise answer
        return answer(1) if callable(answer) else answer

    engine = scripted(by_prompt(chat, one=["a"], two=["b", "c"]))
    rows, users = [user("one"), user("two")], [trouble, saying("u")]
    limits = Limits(tool_timeout_s=0.05)
    failed, answered = rollout_batch(engine, chat, rows, users_batch=users, limits=limits)
    assert (failed.stop_reason, failed.error) == (StopReason.USER_ERROR, error)
    assert exclusion(failed) is Exclusion.FAILED
    assert (answered.stop_reason, answered.num_turns) == (StopReason.ANSWERED, 2)


def test_users_are_not_shared(chat, scripted):
    guest = saying("u")
    with pytest.raises(ValueError, match=r"`num_generations` must be 1 with users, got 2"):
        rollout_batch(scripted(["a"]), chat, [user()], None, 2, users_batch=[guest])
    with pytest.raises(ValueError, match="`users_batch` must have one length, got 1 and 2"):
        rollout_batch(scripted(["a"]), chat, [user()], users_batch=[guest, guest])
    assert guest.seen == []


ENDLESS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def test_a_template_without_an_end_of_turn_is_refused_before_anything_is_sampled(scripted):
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(ENDLESS), needs_tools=False)
    engine = scripted(["a"])
    with pytest.raises(ChatTemplateError, match="writes no end token between an answer and"):
        rollout_batch(engine, chat, [user()], users_batch=[saying("u")])
    assert engine.requests == []
