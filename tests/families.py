"""Every chat template that TRL ships, on a tokenizer of its own: what passes and what is refused.

`python tests/families.py > docs/chat_templates.md` writes the page anew. A tokenizer is a byte-level
BPE trained on the template's own text in milliseconds, with the family's real control tokens, flagged
as the real tokenizers flag them. Turns are taken from renders: what a model writes is what the
template writes of an assistant's message after the prompt.
"""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_vllm.chat import ChatFormat
from agent_vllm.errors import ChatTemplateError
from agent_vllm.tools import Tool


@dataclass(frozen=True, kw_only=True)
class Family:
    """The control tokens of the tokenizers that a template is written for."""

    eos: str
    special: str  # split at white space
    added: str = ""  # tokens of their own, but not special: kept by `skip_special_tokens`
    bos: str | None = None


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
        special="<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> "
        "<|observation|> /nothink",
        added="<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> "
        "</arg_key> <arg_value> </arg_value>",
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
        return ChatFormat.from_tokenizer(tokenizer_of(name))
    except ChatTemplateError as error:
        return error


def accepted():
    return [name for name in template_names() if isinstance(chat_of(name), ChatFormat)]
