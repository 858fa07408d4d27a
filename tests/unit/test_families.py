"""Every template that TRL ships, at token level: prompts, suffixes, ends, calls read back.

The templates that pass and those that are refused are listed in `docs/chat_templates.md`.
"""

import re

import families
import pytest
from fakes import difference
from families import (
    ARGUMENTS,
    CALLS,
    TOOLS,
    USER,
    accepted,
    assistant,
    chat_of,
    family_of,
    ids_of_render,
    losses,
    sampled_turn,
    template_names,
    template_text,
    tool_messages,
    tool_results,
)
from paths import DOCS
from trl.chat_template_utils import add_response_schema, parse_response

from agent_vllm.chat import ChatFormat
from agent_vllm.environments import user_suffix_ids
from agent_vllm.errors import ChatTemplateError
from agent_vllm.tools import encode_result, failure
from agent_vllm.types import ToolCall, ToolResult

each_template = pytest.mark.parametrize("name", accepted())


def writable(chat, calls):
    """As many of the calls as this template writes in one turn."""
    return calls[:1] if chat.template.one_call_per_turn else calls


def switched(chat):
    """The format as it is, and with its thinking switch on and off."""
    return [chat] + ([chat.with_thinking(v) for v in (True, False)] if chat.thinking_switch else [])


# ---- which templates pass ----


def test_the_page_lists_every_template(capsys):
    page = (DOCS / "chat_templates.md").read_text("utf-8")
    with capsys.disabled():
        print("\n" + "\n".join(line for line in page.splitlines() if line.startswith("|")))
    assert families.page() == page
    listed = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines()]
    assert set(template_names()) <= set(listed)


def test_refused_templates_have_no_tool_turns():
    """A refused template can't write calls and results: they are missing from its render."""
    for name in set(template_names()) - set(accepted()):
        assert "does not support tools" in str(chat_of(name)), name


def test_every_family_has_a_tokenizer_of_its_own_tokens():
    for name in template_names():
        tokenizer, family = families.tokenizer_of(name), family_of(name)
        for text in [*family.special.split(), *family.added.split()]:
            assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1, (name, text)
        special = set(tokenizer.all_special_tokens)
        assert special.isdisjoint(family.added.split()), name


# ---- ids ----


@each_template
def test_prompt_ids(name):
    chat = chat_of(name)
    whole = ids_of_render(chat, [USER], add_generation_prompt=True)
    assert chat.prompt_ids([USER], TOOLS) == whole
    assert chat.prompt_ids([USER]) == ids_of_render(chat, [USER], [], add_generation_prompt=True)


@each_template
@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("thinking", [None, "hmm"])
def test_prompt_turn_and_suffix_are_the_whole(name, num_calls, thinking):
    base = chat_of(name)
    calls = writable(base, CALLS[:num_calls])
    results = tool_results(calls)
    turn = assistant(calls, thinking=thinking)
    messages = [USER, turn, *tool_messages(results)]
    for chat in switched(base):
        for tools in ([], TOOLS):
            for is_open in (True, False):
                before, sampled = sampled_turn(chat, turn, tools=tools)
                suffix = chat.suffix_ids(
                    results, tools, last_token_id=sampled[-1], add_generation_prompt=is_open
                )
                whole = ids_of_render(chat, messages, tools, add_generation_prompt=is_open)
                assert difference(before + sampled + suffix, whole) is None


@each_template
def test_the_prompt_is_what_the_turn_follows(name):
    """Of thinking and not thinking, each prompt is the beginning of at least one whole."""
    for chat in switched(chat_of(name)):
        prompt = chat.prompt_ids([USER], TOOLS)
        turns = [assistant(CALLS[:1], thinking=thinking) for thinking in (None, "hmm")]
        starts = [sampled_turn(chat, turn)[0] for turn in turns]
        # DeepSeek-V3's prompt opens a thinking block that no finished turn shows.
        assert prompt in starts or name.startswith("deepseekv3")


@each_template
def test_the_second_round_is_the_whole(name):
    chat = chat_of(name)
    results = tool_results(CALLS[:1])
    turn = assistant(CALLS[:1], thinking="hmm")
    first = [USER, turn, *tool_messages(results)]
    before, sampled = sampled_turn(chat, turn, first)
    suffix = chat.suffix_ids(results, TOOLS, last_token_id=sampled[-1])
    whole = ids_of_render(chat, [*first, turn, *tool_messages(results)], add_generation_prompt=True)
    if name.startswith("deepseekv3"):
        assert difference(before + sampled + suffix, whole) is not None
        assert suffix == chat.suffix_ids(results, last_token_id=chat.turn_end_id)
    else:
        assert difference(before + sampled + suffix, whole) is None


def test_deepseekv3_opens_its_outputs_in_each_round():
    chat = chat_of("deepseekv3")
    text = chat.tokenizer.decode(
        chat.suffix_ids(tool_results(CALLS), last_token_id=chat.turn_end_id)
    )
    assert text == (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>result 0 é<｜tool▁output▁end｜>"
        "<｜tool▁output▁begin｜>result 1 é<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )


def test_gemma4_goes_on_in_its_turn():
    chat = chat_of("gemma4")
    suffix = chat.suffix_ids(tool_results(CALLS[:1]), last_token_id=chat.turn_end_id)
    assert chat.tokenizer.decode([chat.turn_end_id, *suffix]) == (
        '<|tool_response>response:record{value:<|"|>result 0 é<|"|>}<tool_response|>'
    )


def test_glm_writes_the_end_of_a_turn_with_the_next_message():
    chat = chat_of("glm4moe")
    text = chat.tokenizer.decode(chat.suffix_ids(tool_results(CALLS[:1])))
    assert text == ("<|observation|>\n<tool_response>\nresult 0 é\n</tool_response><|assistant|>")


def test_gptoss_has_each_result_under_its_own_name():
    chat = chat_of("gptoss")
    suffix = chat.suffix_ids(tool_results(CALLS), last_token_id=chat.turn_end_id)
    assert chat.tokenizer.decode(suffix) == (
        "<|start|>functions.record to=assistant<|channel|>commentary<|message|>"
        '"result 0 é"<|end|>'
        "<|start|>functions.note to=assistant<|channel|>commentary<|message|>"
        '"result 1 é"<|end|><|start|>assistant'
    )


def test_llama3_has_each_result_in_a_message_of_its_own():
    chat = chat_of("llama3_1")
    suffix = chat.suffix_ids(tool_results(CALLS), last_token_id=chat.turn_end_id)
    assert chat.tokenizer.decode(suffix) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"result 0 é"<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"result 1 é"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@each_template
def test_a_turn_with_another_end_or_none_gets_the_templates_own(name):
    chat = chat_of(name)
    results = tool_results(CALLS[:1])
    _, sampled = sampled_turn(chat, assistant(CALLS[:1]))
    ended = chat.suffix_ids(results, TOOLS, last_token_id=sampled[-1])
    letter = chat.tokenizer("x", add_special_tokens=False)["input_ids"][-1]
    assert chat.suffix_ids(results, TOOLS, last_token_id=letter) == [sampled[-1], *ended]


# ---- control text in what others say ----


def after_result(chat, text):
    return chat.suffix_ids([ToolResult(name="record", content=text, status="ok")], TOOLS)


def after_error(chat, text):
    """Return what a tool raised, as the runner writes it."""
    content = encode_result({"error": str(failure(ValueError(text)))})
    result = ToolResult(name="record", content=content, status="failed")
    return chat.suffix_ids([result], TOOLS)


def after_name(chat, text):
    """A call of an unknown tool, whose name the model wrote."""
    return chat.suffix_ids([ToolResult(name=text, content="no", status="invalid")], TOOLS)


def after_user(chat, text):
    return user_suffix_ids(chat, text, TOOLS)


def in_prompt(chat, text):
    """Return what an environment shows at its reset, as part of a prompt."""
    return chat.prompt_ids([{"role": "user", "content": f"Look: {chat.as_data(text)}"}], TOOLS)


SOURCES = {f.__name__: f for f in (after_result, after_error, after_name, after_user, in_prompt)}


def control_ids(chat, source, text):
    """The control ids among those that bring this text, and the text that they decode to."""
    control = set(chat.tokenizer.get_added_vocab().values())
    ids = SOURCES[source](chat, text)
    return [i for i in ids if i in control], chat.tokenizer.decode(ids)


@each_template
@pytest.mark.parametrize("source", SOURCES)
def test_control_text_of_others_stays_text(name, source):
    """Each of the family's control tokens, a forged turn, and one begun by the text before it."""
    chat = chat_of(name)
    try:
        expected, _ = control_ids(chat, source, "plain")
    except ChatTemplateError as error:
        pytest.skip(str(error))
    texts = sorted(chat.tokenizer.get_added_vocab())
    turn = chat.tokenizer.decode(chat.suffix_ids(tool_results(CALLS[:1]), TOOLS))
    for forged in ("".join(texts) + texts[0], turn, "".join(text[:-1] + text for text in texts)):
        found, shown = control_ids(chat, source, forged)
        assert found == expected, forged
        assert bare(forged) in bare(shown) or source == "after_name"  # some leave names out


def bare(text):
    """Without what JSON, once or twice, makes of it."""
    return re.sub(r"\\+n|\W", "", text)


@each_template
@pytest.mark.parametrize("source", ["after_result", "in_prompt"])
def test_control_text_that_is_not_escaped_is_found(name, source):
    chat = chat_of(name)
    loose = ChatFormat.from_tokenizer(chat.tokenizer, escape_tool_results=False)
    forged = "".join(chat.tokenizer.get_added_vocab())
    few, many = (len(control_ids(loose, source, text)[0]) for text in ("plain", forged))
    assert many > few


# ---- ends ----


@each_template
def test_ends_are_found(name):
    chat = chat_of(name)
    eos = chat.tokenizer.eos_token_id
    for turn in (assistant(CALLS[:1]), assistant(content="It is.")):
        _, sampled = sampled_turn(chat, turn)
        assert sampled[-1] in chat.end_token_ids
        assert not set(sampled[:-1]) & set(chat.end_token_ids)
    assert chat.end_token_ids[0] == eos


# ---- calls ----


@each_template
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_calls_are_read_back(name, kind):
    chat = chat_of(name)
    call = ToolCall(name="record", arguments=ARGUMENTS[kind])
    before, sampled = sampled_turn(chat, assistant([call]))
    parsed = chat.parse(sampled, before, TOOLS)
    assert (parsed.calls == [call]) == (kind not in losses(name))
    if parsed.calls == [call]:
        assert parsed.message["tool_calls"] == [call.as_message()]
        assert parsed.message["content"] == ""
    elif kind != "backslashes":
        assert [c.error is None for c in parsed.calls] == [False]


@each_template
def test_reasoning_text_and_calls_are_told_apart(name):
    chat = chat_of(name)
    calls = writable(chat, CALLS)
    before, sampled = sampled_turn(chat, assistant(calls, thinking="hmm"))
    parsed = chat.parse(sampled, before, TOOLS)
    assert parsed.calls == calls
    assert parsed.message["content"] == ""
    reasoning = {parsed.message.get(key) for key in ("reasoning_content", "thinking")} - {None}
    is_written = "hmm" in chat.tokenizer.decode(sampled)
    assert reasoning == ({"hmm"} if is_written else set())


@each_template
def test_an_answer_is_read(name):
    chat = chat_of(name)
    before, sampled = sampled_turn(chat, assistant(content="It is 汉."))
    parsed = chat.parse(sampled, before, TOOLS)
    assert parsed.message == {"role": "assistant", "content": "It is 汉."}
    assert parsed.calls == []


@each_template
def test_a_cut_turn_has_no_call(name):
    chat = chat_of(name)
    before, sampled = sampled_turn(chat, assistant(CALLS[:1]))
    for end in range(len(sampled) + 1):
        assert chat.parse(sampled[:end], before, TOOLS, is_cut=True).calls == []


@pytest.mark.parametrize(
    ("name", "sign"),
    [("gptoss", "<|call|>"), ("gemma4", "<|tool_response>"), ("glm4moe", "<|observation|>")],
)
def test_an_end_that_only_calls_have_without_a_call_is_an_error(name, sign):
    chat = chat_of(name)
    before, sampled = sampled_turn(chat, assistant(content="It is."))
    assert chat.parse(sampled, before).calls == []
    parsed = chat.parse([*sampled[:-1], chat.turn_end_id], before)
    errors = [call.error for call in parsed.calls]
    assert errors == [f"The turn has {sign} but no call that can be read."]
    assert parsed.message["content"] == "It is."


@each_template
@pytest.mark.parametrize("thinking", [None, "hmm"])
@pytest.mark.parametrize("shape", ["answer", "call", "calls"])
def test_messages_are_those_of_trl(name, thinking, shape):
    """The message is the same, key for key, where TRL can read this template."""
    chat = chat_of(name)
    tokenizer = families.small_tokenizer(template_text(name), family_of(name))
    tokenizer.chat_template = template_text(name.removesuffix("_training"))  # what TRL looks at
    try:
        tokenizer = add_response_schema(tokenizer)
    except ValueError:
        pytest.skip("TRL has no response template for it")
    calls = {"answer": [], "call": CALLS[:1], "calls": writable(chat, CALLS)}[shape]
    turn = assistant(calls, content="" if calls else "It is.", thinking=thinking)
    before, sampled = sampled_turn(chat, turn)
    schemas = [dict(tool.schema) for tool in TOOLS]
    theirs = parse_response(tokenizer, sampled, prefix=before, tools=schemas)
    theirs["content"] = theirs["content"].removesuffix("<|observation|>")  # GLM's end of a call
    ours = chat.parse(sampled, before, TOOLS).message
    assert {key: value for key, value in theirs.items() if value or key == "content"} == ours


def test_own_text_of_every_template_is_used_where_it_can_be_extended():
    replaced = [n for n in accepted() if chat_of(n).chat_template != template_text(n)]
    assert replaced == ["deepseekv3", "qwen3"]
