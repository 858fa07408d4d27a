"""Every chat template that TRL ships, on a tokenizer of its own: what passes, what is refused.

`python tests/families.py > docs/chat_templates.md` writes that page again. A tokenizer is a
byte-level BPE trained on the template's own text in milliseconds, with the family's real control
tokens, special or merely added as in the real tokenizers. Turns are taken from renders: what a
model writes is what the template writes of an assistant's message behind the prompt.
"""

import functools
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_vllm.chat import ChatFormat, ResponseTemplateParser, parse_hermes, response_templates
from agent_vllm.errors import ChatTemplateError
from agent_vllm.tools import Tool
from agent_vllm.types import ToolCall, ToolResult

ONE_OF_EACH = (
    "qwen3",
    "qwen3_5_think",
    "glm4moe",
    "gptoss",
    "llama3_1",
    "lfm2_v2",
    "gemma4",
    "deepseekv3",
    "muse_glimmer",
    "nemotron_3_nano",
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The control tokens of the tokenizers that a template is written for."""

    eos: str
    special: str  # split at white space
    added: str = ""  # tokens of their own, but not special: kept by `skip_special_tokens`
    bos: str | None = None
    more_ends: str = ""  # as `generation_config.eos_token_id` lists them


_CHATML = Family(
    eos="<|im_end|>",
    special="<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|>",
    added="<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>",
)
_GEMMA = Family(
    eos="<end_of_turn>",
    special="<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn>",
    bos="<bos>",
)
_GEMMA4 = Family(
    eos="<turn|>",
    special='<pad> <eos> <bos> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|"|> '
    "<|tool_response> <tool_response|> <|channel> <channel|> <|think|> <|image|> <|audio|>",
    bos="<bos>",
)
_LLAMA3 = Family(
    eos="<|eot_id|>",
    special="<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "<|eom_id|> <|python_tag|>",
    bos="<|begin_of_text|>",
)
_COHERE = Family(
    eos="<|END_OF_TURN_TOKEN|>",
    special="<PAD> <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> "
    "<|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>",
    bos="<BOS_TOKEN>",
)
_DEEPSEEK = Family(
    eos="<｜end▁of▁sentence｜>",
    special="<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>",
    added="<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>",
    bos="<｜begin▁of▁sentence｜>",
)
_PHI = Family(
    eos="<|end|>",
    special="<|endoftext|> <|assistant|> <|system|> <|end|> <|user|>",
    bos="<s>",
)
_IDEFICS = Family(
    eos="<end_of_utterance>",
    special="<|begin_of_text|> <|im_start|> <image> <fake_token_around_image> <end_of_utterance>",
    bos="<|begin_of_text|>",
)
FAMILIES = {  # by the beginning of a template's name
    "qwen": _CHATML,
    "nemotron": Family(
        eos="<|im_end|>",
        special="<unk> <s> </s> <|im_start|> <|im_end|>",
        added="<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>",
        bos="<s>",
    ),
    "lfm2": Family(
        eos="<|im_end|>",
        special="<|pad|> <|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <|tool_list_start|> "
        "<|tool_list_end|> <|tool_call_start|> <|tool_call_end|> <|tool_response_start|> "
        "<|tool_response_end|>",
        added="<think> </think>",
        bos="<|startoftext|>",
    ),
    "glm4moe": Family(
        eos="<|endoftext|>",
        more_ends="<|user|> <|observation|>",
        special="<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> "
        "<|assistant|> <|observation|> /nothink",
        added="<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> "
        "<arg_key> </arg_key> <arg_value> </arg_value>",
    ),
    "gptoss": Family(
        eos="<|return|>",
        special="<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> "
        "<|end|> <|message|> <|call|> <|endofprompt|>",
        bos="<|startoftext|>",
    ),
    "muse": Family(
        eos="<|eot|>",
        special="<|begin_of_text|> <|start|> <|message|> <|eom|> <|eot|> <|patch|> <|video|>",
        bos="<|begin_of_text|>",
    ),
    "gemma4": _GEMMA4,
    "diffusion_gemma": _GEMMA4,
    "gemma": _GEMMA,
    "llama": _LLAMA3,
    "llava": Family(eos="</s>", special="<unk> <s> </s> <image> <pad>", bos="<s>"),
    "cohere": _COHERE,
    "deepseek": _DEEPSEEK,
    "phi": _PHI,
    "idefics": _IDEFICS,
    "smolvlm": _IDEFICS,
}


# ---- templates and tokenizers ----


def _directory():
    return Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"


def template_names():
    """All that TRL ships, training variants among them."""
    return sorted(path.stem for path in _directory().glob("*.jinja"))


def template_text(name):
    return (_directory() / f"{name}.jinja").read_text(encoding="utf-8")


def family_of(name):
    return next(family for start, family in FAMILIES.items() if name.startswith(start))


def small_tokenizer(template, family, vocab_size=700):
    """A byte-level BPE with the family's control tokens, trained on the template's text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([template], trainer)
    special, added = family.special.split(), family.added.split()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=family.eos, bos_token=family.bos, pad_token=special[0]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(added)
    tokenizer.chat_template = template
    return tokenizer


@functools.cache
def tokenizer_of(name):
    return small_tokenizer(template_text(name), family_of(name))


@functools.cache
def chat_of(name):
    """The template's format, or the error that refuses it."""
    try:
        tokenizer = tokenizer_of(name)
        more = tokenizer.convert_tokens_to_ids(family_of(name).more_ends.split())
        return ChatFormat.from_tokenizer(tokenizer, eos_token_ids=more)
    except ChatTemplateError as error:
        return error


def accepted():
    return [name for name in template_names() if isinstance(chat_of(name), ChatFormat)]


# ---- conversations ----

USER = {"role": "user", "content": "What is it?"}
_PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"type": ["integer", "null"]},
    "items": {"type": "array", "items": {"type": "integer"}},
    "nested": {"type": "object"},
}


def _tool(name):
    parameters = {"type": "object", "properties": _PROPERTIES}
    function = {"name": name, "description": f"To {name}.", "parameters": parameters}
    return Tool(schema={"type": "function", "function": function}, function=lambda **_: "done")


TOOLS = [_tool("record"), _tool("note")]
CALLS = [
    ToolCall(name="record", arguments={"count": 1}),
    ToolCall(name="note", arguments={"text": "b"}),
]
ARGUMENTS = {
    "no arguments": {},
    "text": {"text": "plain words"},
    "empty text": {"text": ""},
    "quotes": {"text": 'say "hi" it\'s'},
    "backslashes": {"text": "a\\b \\n"},
    "line breaks": {"text": "a\nb\n\nc"},
    "outer spaces": {"text": "  a "},
    "other scripts": {"text": "汉 é 😀"},
    "digits as text": {"text": "75001"},
    "words of JSON as text": {"text": "true"},
    "brackets": {"text": "f(x)[0], {y} = 1"},
    "tags": {"text": "</tool_call> <think> </parameter>"},
    "integer": {"count": -3},
    "float": {"ratio": 0.5},
    "true": {"flag": True},
    "false": {"flag": False},
    "null": {"maybe": None},
    "list": {"items": [1, 2]},
    "object": {"nested": {"a": {"b": [1, {"c": "x}"}]}}},
    "literals in an object": {"nested": {"a": [True, None, "it's"]}},
    "several": {"text": "x, y", "count": 2, "flag": True},
}

# What a template writes so that nothing can read it back, and what becomes of it.
_TAGS = "a tag inside text ends it: an error for the model"
_LOSSES = {
    "lfm2_2_5_vl": {},
    "lfm2_2_5": {
        "quotes": "written without escapes: an error for the model",
        "backslashes": "written without escapes: read as Python's",
    },
    **{start: {"tags": _TAGS} for start in ("qwen3_5", "qwen3_6", "qwen3_8", "nemotron", "glm")},
}


def losses(name):
    """Kinds of arguments that this template's calls can't be read back with, and why."""
    return next((lost for start, lost in _LOSSES.items() if name.startswith(start)), {})


def assistant(calls=(), content="", thinking=None):
    """A message as templates take it; each reads the key for thinking that it knows."""
    message = {"role": "assistant", "content": content}
    if thinking is not None:
        message |= {"reasoning_content": thinking, "thinking": thinking}
    if calls:
        message["tool_calls"] = [
            replace(call, id=call_id).as_message()
            for call, call_id in zip(calls, _call_ids(), strict=False)
        ]
    return message


def tool_results(calls, content="result {} é"):
    return [
        ToolResult(name=call.name, content=content.format(index), status="ok")
        for index, call in enumerate(calls)
    ]


def tool_messages(results):
    return [
        {**result.message, "tool_call_id": call_id}
        for result, call_id in zip(results, _call_ids(), strict=False)
    ]


def _call_ids():
    return ["call00000", "call00001"]


def ids_of_render(chat, messages, tools=TOOLS, *, add_generation_prompt=False):
    text = chat.template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def sampled_turn(chat, message, before=(USER,), tools=TOOLS):
    """Ids before a turn and of it, end token included, as the template writes them.

    Where the prompt opens a thinking block that this turn doesn't have, what is before ends there.
    """
    prompt = ids_of_render(chat, list(before), tools, add_generation_prompt=True)
    whole = ids_of_render(chat, [*before, message], tools)
    pairs = enumerate(zip(prompt, whole, strict=False))
    cut = next((index for index, (a, b) in pairs if a != b), len(prompt))
    turn = whole[cut:]
    ends = [index for index, token in enumerate(turn) if token in chat.end_token_ids]
    if ends:
        return whole[:cut], turn[: ends[-1] + 1]
    end = chat.turn_end_id if "tool_calls" in message else chat.end_token_ids[0]
    return whole[:cut], [*turn, end]


# ---- the page ----


def parser_name(chat):
    parser = chat.parser.__wrapped__
    if isinstance(parser, ResponseTemplateParser):
        names = response_templates().items()
        return next(name for name, template in names if template is parser.template)
    return "hermes" if parser is parse_hermes else "lfm2"


_PAGE = """\
<!-- Written by `python tests/families.py > docs/chat_templates.md`; a test compares. -->
# Chat templates

TRL {version} ships {total} chat templates. {passed} of them can be used, {refused} are refused.

For each template that can be used, `tests/unit/test_families.py` checks three things, with a
tokenizer that has the family's control tokens:

- Prompt, turn and suffix are, token by token, what the template renders for the whole
  conversation. This covers one call and several, with and without thinking, and a second round of
  tools.
- Calls are read back as the template wrote them.
- Control tokens that a tool result spells stay text.

The columns:

- *as*: the template itself, or TRL's training variant, which is used instead.
- *ends*: the tokens that end a turn. The bold one ends a turn with calls.
- *calls*: how many calls the template writes in one turn.
- *not read back*: arguments that the template writes ambiguously.

| template | as | parser | ends | calls | thinking switch | not read back |
|---|---|---|---|---|---|---|
{rows}

DeepSeek-V3's template writes the opening marks in the first round only, as if all rounds were one
list. The suffix has them in each round.

## Refused

| template | why |
|---|---|
{reasons}
"""


def page():
    import trl

    chats = {name: chat_of(name) for name in template_names()}
    passed = {name: chat for name, chat in chats.items() if isinstance(chat, ChatFormat)}
    refused = {name: chat for name, chat in chats.items() if name not in passed}
    return _PAGE.format(
        total=len(chats),
        version=trl.__version__,
        passed=len(passed),
        refused=len(refused),
        rows="\n".join(_row(name, chat) for name, chat in passed.items()),
        reasons="\n".join(f"| {name} | {_reason(error)} |" for name, error in refused.items()),
    )


def _row(name, chat):
    is_own = chat.chat_template == template_text(name)
    texts = [(end, f"`{chat.tokenizer.decode([end])}`") for end in chat.end_token_ids]
    ends = [f"**{text}**" if end == chat.turn_end_id else text for end, text in texts]
    cells = [
        name,
        "itself" if is_own else "training variant",
        parser_name(chat),
        " ".join(sorted(ends, key=lambda text: not text.startswith("**"))),
        "one" if chat.template.one_call_per_turn else "several",
        f"`{chat.thinking_switch}`" if chat.thinking_switch else "",
        "; ".join(f"{kind} ({why})" for kind, why in losses(name).items()),
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _reason(error):
    """Return what the error says after the name of the tokenizer, which has none here."""
    return str(error).removeprefix("The chat template of '' ").partition(". ")[0]


if __name__ == "__main__":
    print(page(), end="")
