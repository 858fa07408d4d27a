"""Conversations to ids: prompts, suffixes, templates that are refused."""

import dataclasses

import pytest
from fakes import CHATML, END, byte_tokenizer, call, chatml_tokenizer, ids_of, trl_template, user
from tokenizers.processors import TemplateProcessing

from agent_vllm.chat import ChatFormat
from agent_vllm.errors import ChatTemplateError
from agent_vllm.rollout import rollout_single
from agent_vllm.tools import as_tool
from agent_vllm.types import StopReason, ToolResult

PLAIN = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAMED_RESULTS = CHATML.replace("{{ message.role }}", "{{ message.role }} {{ message.name or '' }}")


def result(content="42", name="lookup"):
    return ToolResult(name=name, content=content, status="ok")


def text_of(chat, ids):
    return chat.tokenizer.decode(ids)


# ---- ids ----


def test_prompt(chat):
    assert text_of(chat, chat.prompt_ids(user("hi"))) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prompt_shows_the_tools(chat):
    def ping() -> str:
        """Ping."""

    text = text_of(chat, chat.prompt_ids(user("hi"), [as_tool(ping)]))
    assert text.startswith('<|im_start|>system\n{"name": "ping", "description": "Ping."')


def test_suffix_after_an_end_token(chat):
    ids = chat.suffix_ids([result("42")], last_token_id=END)
    assert text_of(chat, ids) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


def test_suffix_without_a_next_turn(chat):
    ids = chat.suffix_ids([result("42")], last_token_id=END, add_generation_prompt=False)
    assert text_of(chat, ids) == "\n<|im_start|>tool\n42<|im_end|>\n"


def test_an_end_that_was_not_sampled_is_part_of_the_suffix(chat):
    ended = chat.suffix_ids([result()], last_token_id=END)
    open_turn = chat.suffix_ids([result()], last_token_id=ids_of(chat.tokenizer, "x")[0])
    assert open_turn == [END, *ended]


def test_another_end_token_is_followed_by_the_templates_own(tokenizer):
    end_of_text = tokenizer.pad_token_id
    chat = ChatFormat.from_tokenizer(tokenizer, eos_token_ids=[end_of_text])
    assert chat.end_token_ids == (END, end_of_text)
    assert chat.decode_turn([*ids_of(tokenizer, "hi"), end_of_text]) == "hi"
    assert chat.suffix_ids([result()], last_token_id=end_of_text)[0] == END


@pytest.mark.parametrize(
    "template", [CHATML, *map(trl_template, ["qwen2_5", "qwen3_training", "qwen3_5_think"])]
)
@pytest.mark.parametrize("contents", [["42"], ["42", "<tool_call>汉\n"]])
def test_prompt_and_turn_and_suffix_are_the_render_of_the_conversation(template, contents):
    """The prefix property: what the template renders for the calls and results, token by token."""
    tokenizer = chatml_tokenizer(template)
    chat = ChatFormat.from_tokenizer(tokenizer, escape_tool_results=False)
    results = [result(content, f"f{i}") for i, content in enumerate(contents)]
    calls = [{"type": "function", "function": {"name": r.name, "arguments": {}}} for r in results]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = [*user("x"), turn, *(r.message for r in results)]
    whole = chat.prompt_ids(messages)
    suffix = chat.suffix_ids(results, last_token_id=END)
    assert whole[-len(suffix) :] == suffix
    assert whole[-len(suffix) - 1] == END


def test_no_system_text_in_the_suffix():
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(trl_template("qwen2_5")))
    assert "You are Qwen" in text_of(chat, chat.prompt_ids(user()))
    assert text_of(chat, chat.suffix_ids([result("42")], last_token_id=END)) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_no_date_in_the_suffix():
    dated = "<|im_start|>system\n{{ strftime_now('Today is %Y') }}<|im_end|>\n" + CHATML
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(dated))
    assert "Today is" in text_of(chat, chat.prompt_ids(user()))
    assert "Today is" not in text_of(chat, chat.suffix_ids([result()], last_token_id=END))


def test_no_tools_and_an_empty_list_are_one():
    template = "{% if tools is not none %}ENV{% endif %}" + CHATML
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(template))
    assert chat.prompt_ids(user(), []) == chat.prompt_ids(user())
    assert "ENV" not in text_of(chat, chat.prompt_ids(user(), []))


def test_a_prompt_begins_with_one_beginning_of_sequence():
    tokenizer = chatml_tokenizer("<|endoftext|>" + CHATML)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer("x")["input_ids"][0] == 0
    assert ChatFormat.from_tokenizer(tokenizer).prompt_ids(user()).count(0) == 1


def test_two_results_keep_their_own_names():
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(NAMED_RESULTS))
    ids = chat.suffix_ids([result("1", "first"), result("2", "second")], last_token_id=END)
    assert text_of(chat, ids) == (
        "\n<|im_start|>tool first\n1<|im_end|>\n<|im_start|>tool second\n2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_name_that_spells_control_tokens_stays_text():
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(NAMED_RESULTS))
    ids = chat.suffix_ids([result(name="<|im_end|>")], last_token_id=END)
    assert ids.count(END) == 1
    assert text_of(chat, ids).startswith("\n<|im_start|>tool <|im_end|>\n42")


def test_a_name_that_no_tokenizer_takes():
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(NAMED_RESULTS))
    ids = chat.suffix_ids([result(name="\ud83d")], last_token_id=END)
    assert text_of(chat, ids).startswith("\n<|im_start|>tool ?\n42")


def test_the_conversation_is_not_written_to(chat):
    messages = [*user(), {"role": "assistant", "content": "a", "tool_calls": []}]
    before = [dict(message) for message in messages]
    chat.prompt_ids(messages)
    assert messages == before


# ---- turns ----


def test_text_is_read_from_the_ids_with_every_space():
    tokenizer = chatml_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    chat = ChatFormat.from_tokenizer(tokenizer)
    text = "a , b do n't ?"
    assert chat.decode_turn(ids_of(tokenizer, text)) == text


def test_only_the_last_end_token_is_taken_off(chat):
    ids = ids_of(chat.tokenizer, "a<|im_end|>b<|im_end|>")
    assert chat.decode_turn(ids) == "a<|im_end|>b"


def test_an_empty_turn_is_an_empty_message(chat):
    assert chat.parse([]).message == {"role": "assistant", "content": ""}


# ---- the thinking switch ----


def test_thinking_switch_is_found_and_set(chat):
    assert chat.thinking_switch == "enable_thinking"
    on, off = chat.with_thinking(True), chat.with_thinking(False)
    assert on.prompt_ids(user()) == chat.prompt_ids(user())
    assert text_of(off, off.prompt_ids(user())).endswith("assistant\n<think></think>")


def test_thinking_switch_is_kept_in_later_renders(chat):
    off = chat.with_thinking(False)
    ids = off.suffix_ids([result()], last_token_id=END)
    assert text_of(off, ids).endswith("<|im_start|>assistant\n<think></think>")


def test_other_template_arguments_stay():
    template = CHATML.replace("{{ message.role }}", "{{ message.role }}{{ mark }}")
    chat = ChatFormat.from_tokenizer(
        chatml_tokenizer(template), template_kwargs={"mark": "!"}
    ).with_thinking(False)
    assert text_of(chat, chat.prompt_ids(user("hi"))) == (
        "<|im_start|>user!\nhi<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )


def test_no_thinking_switch():
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(PLAIN), needs_tools=False)
    with pytest.raises(ChatTemplateError, match="no thinking switch"):
        chat.with_thinking(True)


# ---- templates that are refused ----


def test_no_template():
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatFormat.from_tokenizer(chatml_tokenizer(None))


@pytest.mark.parametrize("needs_tools", [True, False])
def test_template_with_a_syntax_error(needs_tools):
    with pytest.raises(ChatTemplateError, match="has an error: Expected an expression"):
        ChatFormat.from_tokenizer(chatml_tokenizer("{% if %}"), needs_tools=needs_tools)


def test_a_template_that_drops_calls_is_refused():
    with pytest.raises(ChatTemplateError, match="does not support tools"):
        ChatFormat.from_tokenizer(chatml_tokenizer(PLAIN))


def test_a_template_without_tools_is_fine_where_none_are_needed():
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(PLAIN), needs_tools=False)
    assert text_of(chat, chat.prompt_ids(user("hi"))).startswith("<|im_start|>user\nhi")


def test_a_template_that_changes_the_last_turn_is_refused():
    last = "{% if loop.last and message.role == 'assistant' %}LAST{% endif %}<|im_end|>"
    template = CHATML.replace(
        "</tool_call>{% endfor %}<|im_end|>", "</tool_call>{% endfor %}" + last
    )
    assert template != CHATML
    with pytest.raises(ChatTemplateError, match="can't be extended turn by turn"):
        ChatFormat.from_tokenizer(chatml_tokenizer(template))


def test_a_known_template_is_replaced_by_its_training_variant():
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(trl_template("qwen3")))
    assert chat.chat_template == trl_template("qwen3_training")


def test_a_conversation_that_the_template_refuses():
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('Not this') }}{% endif %}"
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(template + CHATML))
    with pytest.raises(ChatTemplateError, match=r"Not this.*Roles were \['user'\]"):
        chat.prompt_ids(user("no"))


def test_no_end_token():
    tokenizer = chatml_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ChatTemplateError, match="No end-of-turn token"):
        ChatFormat.from_tokenizer(tokenizer, needs_tools=False)


# ---- cutting text ----


@pytest.mark.parametrize("text", ["9" * 5000, "汉" * 3000])
def test_text_is_cut_in_tokens_and_marked(chat, text):
    cut = chat.truncate(text, 64)
    num_cut = len(text) - (64 - len("\n[... 5000 tokens cut]"))
    assert cut == text[: len(text) - num_cut] + f"\n[... {num_cut} tokens cut]"
    assert len(ids_of(chat.tokenizer, cut)) == 64


def test_json_that_was_cut_is_marked_as_cut(chat):
    text = '{"rows": [' + "1, " * 99 + "1]}"
    cut = chat.truncate(text, 40)
    kept, _, mark = cut.rpartition("\n")
    assert text.startswith(kept)
    assert mark == f"[... {len(text) - len(kept)} tokens cut]"


def test_text_that_fits_is_left_alone(chat):
    assert chat.truncate("9" * 64, 64) == "9" * 64


def test_no_half_character_is_left_behind():
    chat = ChatFormat.from_tokenizer(byte_tokenizer())
    for max_tokens in range(30, 36):
        text, _, _ = chat.truncate("汉" * 100, max_tokens).partition("\n")
        assert text == "汉" * len(text), max_tokens


# ---- what reads turns ----


def test_a_response_template_that_knows_no_thinking_is_not_preferred():
    """Its calls would run where they are only thought of; the next that reads them does better."""
    tokenizer = chatml_tokenizer()
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|im_end|>"},
        },
    }
    chat = ChatFormat.from_tokenizer(tokenizer)
    plain = ids_of(tokenizer, call("add", a=1))
    thought = ids_of(tokenizer, "<think>" + call("add", a=1) + "</think>3")
    assert [len(chat.parse([*ids, END]).calls) for ids in (plain, thought)] == [1, 0]


def test_the_day_changes_between_two_turns(chat):
    """A render that was kept has another date in it."""
    dated = dataclasses.replace(
        chat.template, text="{{ day }}" + chat.template.text, kwargs={"day": "Monday"}
    )
    before = dated.after_tool_turn([result()], add_generation_prompt=True)
    dated.kwargs["day"] = "Tuesday"
    assert dated.after_tool_turn([result()], add_generation_prompt=True) == before


# ---- content in blocks ----


def test_blocks_of_text_are_one_text(chat):
    blocks = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert chat.prompt_ids([{"role": "user", "content": blocks}]) == chat.prompt_ids(user("hi"))


def test_images_are_refused_with_the_reason(chat):
    blocks = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "hi"}]
    with pytest.raises(ChatTemplateError, match=r"text only.*'user'.*\['image', 'text'\]"):
        chat.prompt_ids([{"role": "user", "content": blocks}])


def test_without_tools_nothing_is_a_call(chat):
    """Known to be none, that is: a parser alone doesn't know which tools are on offer."""
    text = call("lookup", q="x")
    ids = [*ids_of(chat.tokenizer, text), END]
    assert [c.name for c in chat.parse(ids).calls] == ["lookup"]
    offered_none = chat.parse(ids, (), [])
    assert (offered_none.calls, offered_none.message["content"]) == ([], text)
    assert "tool_calls" not in offered_none.message


@pytest.mark.parametrize("needs_tools", [True, False])
def test_a_call_sampled_without_tools_is_an_answer(scripted, needs_tools):
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(), needs_tools=needs_tools)
    t = rollout_single(scripted([call("lookup", q="x")]), chat, user())
    assert (t.stop_reason, t.tool_results, t.num_turns) == (StopReason.ANSWERED, [], 1)
    assert t.messages[-1] == {"role": "assistant", "content": call("lookup", q="x")}
