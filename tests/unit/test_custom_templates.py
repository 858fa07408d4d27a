"""Templates of one's own: what is found out about them, what is refused, parsers by name."""

import json
import random

import pytest
from fakes import broken_properties
from families import CALLS, TOOLS, USER, Family, small_tokenizer, tool_results

from agent_vllm.chat import ChatFormat
from agent_vllm.errors import ChatTemplateError
from agent_vllm.types import ToolCall

_TAGS = Family(eos="<end>", special="<pad> <end> <user> <assistant> <tool>")

# One mark a role; calls in the Hermes form.
PLAIN = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<end>
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
MISTRAL = """\
<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": \
{{ c.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]</s>
{%- else %}{{ m.content }}</s>{% endif %}{% endfor %}"""
COHERE = """\
{%- for m in messages %}<|START_OF_TURN_TOKEN|>
{%- if m.role == 'tool' %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m.content }}<|END_TOOL_RESULT|>
{%- elif m.tool_calls %}<|CHATBOT_TOKEN|><|START_ACTION|>[
{%- for c in m.tool_calls %}{"tool_call_id": "{{ loop.index0 }}", "tool_name": \
"{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}
{{- ', ' if not loop.last }}{% endfor %}]<|END_ACTION|>
{%- elif m.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>
{%- else %}<|USER_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""
LLAMA4 = """\
<|begin_of_text|>{% for m in messages %}<|header_start|>
{{- 'ipython' if m.role == 'tool' else m.role }}<|header_end|>

{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}(
{%- for key, value in c.function.arguments.items() %}{{ key }}={{ value | tojson }}
{{- ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]
{%- else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""
DEEPSEEK = """\
{%- for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- else %}<｜Assistant｜>{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}
```json
{{ c.function.arguments | tojson }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""


def chat_of(template, family=_TAGS, **options):
    return ChatFormat.from_tokenizer(small_tokenizer(template, family), **options)


def text_of(chat, ids):
    return chat.tokenizer.decode(ids)


# ---- what is found out ----


def test_a_template_without_line_breaks_between_turns():
    chat = chat_of(PLAIN)
    end = chat.tokenizer.eos_token_id
    assert (chat.turn_end_id, chat.marks.after_turn_end) == (end, "")
    suffix = chat.suffix_ids(tool_results(CALLS), TOOLS, last_token_id=end)
    assert text_of(chat, suffix) == "<tool>result 0 é<end><tool>result 1 é<end><assistant>"


@pytest.mark.parametrize(
    "start", ["<user>You are kind.<end>", "<user>{{ strftime_now('Today is %Y') }}<end>"]
)
def test_a_default_system_prompt_or_date_is_in_the_prompt_only(start):
    chat = chat_of(start + PLAIN)
    plain = chat_of(PLAIN)
    assert text_of(chat, chat.prompt_ids([USER])).count("<user>") == 2
    suffix = chat.suffix_ids(tool_results(CALLS), TOOLS)
    assert text_of(chat, suffix) == text_of(plain, plain.suffix_ids(tool_results(CALLS), TOOLS))


def test_a_template_that_writes_no_end():
    """Turns end with the next one's mark; the model ends them with the end of sequence."""
    chat = chat_of(PLAIN.replace("<end>", ""))
    end = chat.tokenizer.eos_token_id
    mark = chat.tokenizer.convert_tokens_to_ids("<tool>")
    assert (chat.turn_end_id, chat.marks.after_turn_end) == (mark, None)
    assert chat.end_token_ids == (end, mark)
    suffix = chat.suffix_ids(tool_results(CALLS[:1]), TOOLS, last_token_id=end)
    assert text_of(chat, suffix) == "<tool>result 0 é<assistant>"


def test_a_template_in_plain_words_has_no_end_but_that_of_the_sequence():
    words = PLAIN.replace("<end>", "{{ '\\n' }}").replace("<{{ m.role }}>", "{{ m.role }}: ")
    chat = chat_of(words.replace("<assistant>", "assistant: "))
    assert (chat.turn_end_id, chat.end_token_ids) == (None, (chat.tokenizer.eos_token_id,))
    suffix = chat.suffix_ids(tool_results(CALLS[:1]), TOOLS, last_token_id=chat.end_token_ids[0])
    assert text_of(chat, suffix) == "tool: result 0 é\nassistant: "


# ---- what is refused ----

LAST = "{% if loop.last and m.role == 'assistant' %}!{% endif %}<end>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PLAIN.replace("<end>", LAST), "can't be extended turn by turn"),
        (PLAIN.replace("{% endfor %}", ""), "The chat template has an error"),
        ("{% for m in messages %}{{ m.content }}<end>{% endfor %}", "does not support tools"),
        (PLAIN.replace("tool_call>", "do>"), "No known parser reads a call"),
    ],
    ids=["last turn", "syntax", "content only", "unknown form of calls"],
)
def test_a_template_that_cannot_work_is_refused_with_a_reason(template, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        chat_of(template)


def test_an_unknown_form_of_calls_is_fine_with_a_parser():
    chat = chat_of(PLAIN.replace("tool_call>", "do>"), parser="hermes")
    turn = '<tool_call>{"name": "note", "arguments": {}}</tool_call>'
    ids = chat.tokenizer(turn, add_special_tokens=False)["input_ids"]
    assert chat.parse(ids).calls == [ToolCall(name="note", arguments={})]


def test_an_unknown_parser_is_named():
    with pytest.raises(ValueError, match=r"got 'hermez'\. Known: hermes, lfm2, "):
        chat_of(PLAIN, parser="hermez")


# ---- parsers by name ----


def body(call):
    return json.dumps({"name": call.name, "arguments": call.arguments})


MARKS = {
    MISTRAL: "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] "
    "[TOOL_RESULTS] [/TOOL_RESULTS]",
    COHERE: "<PAD> <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> "
    "<|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> <|START_ACTION|> "
    "<|END_ACTION|> <|START_TOOL_RESULT|> <|END_TOOL_RESULT|> <|START_THINKING|> "
    "<|END_THINKING|>",
    LLAMA4: "<|begin_of_text|> <|header_start|> <|header_end|> <|eot|> <|eom|> <|python_tag|>",
    DEEPSEEK: "<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
    "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁output▁begin｜> "
    "<｜tool▁output▁end｜> <｜tool▁sep｜>",
    PLAIN: "<pad> <end> <user> <assistant> <tool>",
}
ENDS = {
    MISTRAL: "</s>",
    COHERE: "<|END_OF_TURN_TOKEN|>",
    LLAMA4: "<|eot|>",
    DEEPSEEK: "<｜end▁of▁sentence｜>",
    PLAIN: "<end>",
}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("template", "parser", "turn"),
    [
        (
            MISTRAL,
            "mistral",
            f"[TOOL_CALLS][{body(CALLS[0])}, {body(CALLS[1])}]",
        ),
        (
            COHERE,
            "cohere_command3",
            "<|START_ACTION|>["
            '{"tool_call_id": "0", "tool_name": "record", "parameters": {"count": 1}}, '
            '{"tool_call_id": "1", "tool_name": "note", "parameters": {"text": "b"}}]'
            "<|END_ACTION|>",
        ),
        (LLAMA4, "pythonic", '[record(count=1), note(text="b")]'),
        (LLAMA4, "llama4_pythonic", '[record(count=1), note(text="b")]'),
        (
            LLAMA4,
            "llama3_json",
            '{"name": "record", "parameters": {"count": 1}}; '
            '{"name": "note", "parameters": {"text": "b"}}',
        ),
        (
            DEEPSEEK,
            "deepseek_v3",
            "<｜tool▁calls▁begin｜>"
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>record\n```json\n{"count": 1}\n```'
            "<｜tool▁call▁end｜>"
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n{"text": "b"}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            PLAIN,
            "hermes",
            f"<tool_call>{body(CALLS[0])}</tool_call><tool_call>{body(CALLS[1])}</tool_call>",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_parsers_by_name(template, parser, turn):
    chat = chat_of(template, Family(eos=ENDS[template], special=MARKS[template]), parser=parser)
    end = chat.tokenizer.eos_token_id
    ids = chat.tokenizer(turn, add_special_tokens=False)["input_ids"]
    parsed = chat.parse([*ids, end], chat.prompt_ids([USER], TOOLS), TOOLS)
    assert [(c.name, c.arguments, c.error) for c in parsed.calls] == [
        (c.name, c.arguments, None) for c in CALLS
    ]
    assert parsed.message["content"] == ""
    answer = chat.tokenizer("It is 汉.", add_special_tokens=False)["input_ids"]
    assert chat.parse([*answer, end]).message == {"role": "assistant", "content": "It is 汉."}
    assert end in chat.end_token_ids
    check_broken_turns(chat, ids)


def check_broken_turns(chat, ids):
    """300 cut, spliced and repeated; vLLM's parsers are slower than ours and get no more."""
    rng = random.Random(0)
    control = sorted(chat.tokenizer.get_added_vocab().values())
    for _ in range(300):
        at, to = sorted(rng.choices(range(len(ids) + 1), k=2))
        middle = rng.choice([[], ids, ids[at:to] * 3, rng.choices(control, k=2)])
        parsed = chat.parse([*ids[:at], *middle, *ids[to:]], (), TOOLS)
        assert broken_properties(parsed) == []


@pytest.mark.vllm
def test_a_parser_of_vllm_that_reads_streams_only_is_refused():
    with pytest.raises(ValueError, match="'cohere_command4', which reads streams only"):
        chat_of(PLAIN, parser="cohere_command4")


@pytest.mark.vllm
@pytest.mark.parametrize("template", [MISTRAL, COHERE, DEEPSEEK])
def test_parsers_are_found_by_the_calls_mark(template):
    chat = chat_of(template, Family(eos=ENDS[template], special=MARKS[template]))
    suffix = chat.suffix_ids(tool_results(CALLS), TOOLS, last_token_id=chat.turn_end_id)
    whole = text_of(chat, suffix)
    assert whole.index("result 0 é") < whole.index("result 1 é")
