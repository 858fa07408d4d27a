"""Train a tool-using agent of half a million parameters from scratch, on a CPU.

Owns its tokenizer, chat template, model and training; the tools and tasks are in `tiny_tasks.py`.
Training ends with demonstrations that are often bad, so that the agent mostly fails when it is
sampled, yet often enough does the right thing: reinforcement learning has something to improve.
Invariant: the text and the tokens of a conversation are a prefix of those of its continuation.

Dims: B rows, T tokens, N assistant tokens, D hidden size.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from cache import made_once
from hermes import RESPONSE_TEMPLATE
from tiny_tasks import (
    BUILDERS,
    CITIES,
    ITEMS,
    NAMES,
    SMALL_KINDS,
    TOOLS,
    Message,
    PracticeDraws,
    Task,
    demonstration,
)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Size = Literal["full", "small"]

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 896
MAX_POSITIONS = 1024
# With the weight decay below they keep logits small, and so float32 logprobs exact to a few 1e-6.
Z_LOSS = 1e-3
ROPE_THETA = 1000.0  # conversations are short

# ChatML; tools as one line each. Every message is rendered by itself, so that a conversation's text
# is always a prefix of its continuation's text.
CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|im_start|>system\\n' + system }}
    {%- for tool in tools or [] %}
        {%- set function = tool.function or tool %}
        {{- '\\n' if system or not loop.first else '' }}
        {{- function.name + '(' + function.parameters.properties | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
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
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Describe one phase of training: a short warm-up, then a cosine decay to almost zero."""

    label: str
    num_steps: int
    muon_lr: float  # for the matrices inside the layers
    adamw_lr: float  # for the embeddings and norms


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Describe what an agent is trained on, and for how long."""

    kinds: tuple[str, ...]
    clean: Phase
    noisy: Phase


RECIPES: dict[Size, Recipe] = {
    "full": Recipe(
        kinds=tuple(BUILDERS),
        clean=Phase(label="clean", num_steps=600, muon_lr=0.05, adamw_lr=0.016),
        noisy=Phase(label="noisy", num_steps=110, muon_lr=0.01, adamw_lr=0.003),
    ),
    "small": Recipe(
        kinds=SMALL_KINDS,
        clean=Phase(label="clean", num_steps=200, muon_lr=0.05, adamw_lr=0.016),
        noisy=Phase(label="noisy", num_steps=50, muon_lr=0.015, adamw_lr=0.003),
    ),
}
BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Hold a tokenized conversation."""

    token_ids: list[int]  # [T]
    is_assistant: list[bool]  # [T], written by the assistant, its end token included


# ---- tokenizer ----


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerBase:
    """Build a byte-level BPE tokenizer of `VOCAB_SIZE` tokens, with the chat template.

    A newline and every pair of digits are pieces of their own. A word takes the space behind it, so
    that a word before a punctuation mark has the same tokens as in JSON.
    """
    backend = Tokenizer(models.BPE())
    pieces = Regex(r"\n|\d{1,2}|[A-Za-z_]+ ?|[^A-Za-z_\d\n]+")
    split = pre_tokenizers.Split(pieces, behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    call_tags = [AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(call_tags),
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(call_tags)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,  # not the end of a turn, which has to stay visible in a batch
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def _tokenizer_texts(conversations: list[list[Message]]) -> list[str]:
    """Return the texts, with each name and digit pair often enough to become one token."""
    messages = [message for conversation in conversations for message in conversation]
    said = [message["content"] for message in messages]
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    called = [json.dumps(call["function"]) for call in calls]
    words = [*CITIES, *ITEMS, *NAMES, *(f"{number:02d}" for number in range(100))]
    frame = ["system\nuser\nassistant\ntool\n", *(f"{tool.__name__}(" for tool in TOOLS)]
    return [*said, *called, *frame * 1000, *words * 300]


# ---- model ----


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """Build a float32 Qwen3 of two layers with fresh weights."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


# ---- demonstrations ----

# The shares of noisy demonstrations in which something goes wrong.
_ANSWERS_AT_ONCE = 0.12
_CALLS_FOR_NOTHING = 0.2  # where nothing has to be looked up
_CALL_FAILS = 0.55  # of each call
_REPLY_IS_WRONG = 0.15
_ERRORS = (
    "The call is not valid JSON: Expecting ',' delimiter.",
    "Unknown tool 'search'. Available tools: calculator, get_weather, get_price.",
    "Wrong arguments for 'get_price': arguments: 'item' is a required property",
    "ValueError: No weather is known for 'Atlantis'.",
)


def practice_tasks(kinds: tuple[str, ...], phase: Phase, rng: Random) -> list[Task]:
    """Return as many tasks as the phase needs, so that none is used twice; kinds alternate."""
    draws = PracticeDraws(rng)
    num_tasks = phase.num_steps * BATCH_SIZE
    return [BUILDERS[kinds[i % len(kinds)]](draws) for i in range(num_tasks)]


def spoiled_demonstration(task: Task, rng: Random) -> list[Message]:
    """Return a demonstration that may contain errors; after a failed call the agent gives up."""
    question, *turns = demonstration(task)
    if rng.random() < _ANSWERS_AT_ONCE:
        return [question, _wrong_reply(task, rng)]
    if not task.calls and rng.random() < _CALLS_FOR_NOTHING:
        return [question, *_failed_call({"name": "calculator", "arguments": {}}, rng)]
    messages = [question]
    for turn in turns:
        if "tool_calls" in turn and rng.random() < _CALL_FAILS:
            return [*messages, *_failed_call(turn["tool_calls"][0]["function"], rng)]
        messages.append(turn)
    if rng.random() < _REPLY_IS_WRONG:
        messages[-1] = _wrong_reply(task, rng)
    return messages


def _wrong_reply(task: Task, rng: Random) -> Message:
    is_number = task.answer.lstrip("-").isdigit()
    wrong = task.reply.replace(task.answer, str(rng.randint(2, 999)))
    return {"role": "assistant", "content": wrong if is_number else "I do not know."}


def _failed_call(function: dict[str, Any], rng: Random) -> list[Message]:
    """Return a call that can't be read or run, its error and a reply that gives up."""
    call = f"<tool_call>\n{_bad_call(function, rng)}\n</tool_call>"
    return [
        {"role": "assistant", "content": call},
        {"role": "tool", "content": json.dumps({"error": rng.choice(_ERRORS)})},
        {"role": "assistant", "content": "I do not know."},
    ]


def _bad_call(function: dict[str, Any], rng: Random) -> str:
    text = json.dumps(function)
    shares_and_calls = (
        (0.3, text.removesuffix("}")),
        (0.2, text.removesuffix("}}") + ",}}"),
        (0.25, text.removesuffix('"}}') + "}}"),
        (0.15, json.dumps({**function, "name": "search"})),
        (0.1, json.dumps({**function, "arguments": {}})),
    )
    shares, calls = zip(*shares_and_calls, strict=True)
    return rng.choices(calls, shares)[0]


def as_examples(
    conversations: list[list[Message]], tokenizer: PreTrainedTokenizerBase
) -> list[Example]:
    encoded = tokenizer.apply_chat_template(
        conversations, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    return [
        Example(token_ids=token_ids, is_assistant=[flag == 1 for flag in flags])
        for token_ids, flags in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    ]


# ---- training ----


def train(model: Qwen3ForCausalLM, examples: list[Example], phase: Phase, rng: Random) -> None:
    """Train one pass with Muon and AdamW; AdamW alone takes far longer to learn to copy."""
    optimizers = _optimizers(model, phase)
    schedules = [LambdaLR(optimizer, _lr_factor(phase.num_steps)) for optimizer in optimizers]
    started = reported = time.monotonic()
    for step, batch in enumerate(_batches(examples, rng), start=1):
        loss = assistant_loss(model, batch)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in (*optimizers, *schedules):
            stepper.step()
        if time.monotonic() - reported > 5 or step == phase.num_steps:
            reported = time.monotonic()
            progress = f"step {step}/{phase.num_steps}, loss {loss.item():.3f}"
            print(f"tiny agent, {phase.label}: {progress}, {reported - started:.0f} s", flush=True)


def _optimizers(model: Qwen3ForCausalLM, phase: Phase) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=phase.muon_lr, weight_decay=0.2),
        torch.optim.AdamW(others, lr=phase.adamw_lr, betas=(0.9, 0.98), weight_decay=0.5),
    ]


def _lr_factor(num_steps: int, num_warmup_steps: int = 20) -> Callable[[int], float]:
    def factor(step: int) -> float:
        warmup = min(1.0, (step + 1) / num_warmup_steps)
        return warmup * (1 + math.cos(math.pi * step / num_steps)) / 2 + 0.01

    return factor


def _batches(examples: list[Example], rng: Random) -> list[list[Example]]:
    """Return all examples once, in batches of similar length, to keep padding low."""
    shuffled = rng.sample(examples, len(examples))
    batches: list[list[Example]] = []
    for group in _slices(shuffled, BATCH_SIZE * 8):
        by_length = sorted(group, key=lambda example: len(example.token_ids))
        batches += rng.sample(parts := _slices(by_length, BATCH_SIZE), len(parts))
    return batches


def _slices(examples: list[Example], size: int) -> list[list[Example]]:
    return [examples[start : start + size] for start in range(0, len(examples), size)]


def assistant_loss(model: Qwen3ForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Return the mean loss of the assistant's tokens. Padding comes last, so no mask is needed."""
    token_ids = _padded([row.token_ids for row in batch], model.config.pad_token_id)  # [B, T]
    is_target = _padded([row.is_assistant for row in batch], False)[:, 1:]  # [B, T - 1]
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state  # [B, T, D]
    logits = model.lm_head(hidden[:, :-1][is_target])  # [N, V]
    loss = cross_entropy(logits, token_ids[:, 1:][is_target])
    return loss + Z_LOSS * logits.logsumexp(-1).square().mean()


def _padded(rows: list[list], value: int | bool) -> torch.Tensor:
    length = max(map(len, rows))
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])


# ---- the agent ----


def build_tiny_agent(output_dir: str | Path, size: Size = "full") -> None:
    """Train an agent and save its model and tokenizer to a folder, in Hugging Face format.

    Args:
        output_dir: made if it does not exist.
        size: "full" has every kind of task; "small" has `SMALL_KINDS`, for tests.
    """
    recipe = RECIPES[size]
    rng = Random(0)
    clean = [demonstration(task) for task in practice_tasks(recipe.kinds, recipe.clean, rng)]
    noisy = [
        spoiled_demonstration(task, rng) for task in practice_tasks(recipe.kinds, recipe.noisy, rng)
    ]
    tokenizer = build_tokenizer(_tokenizer_texts(clean + noisy))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(tokenizer)
    train(model, as_examples(clean, tokenizer), recipe.clean, rng)
    train(model, as_examples(noisy, tokenizer), recipe.noisy, rng)
    tokenizer.save_pretrained(output_dir)
    model.save_pretrained(output_dir)


def tiny_agent_path(size: Size = "full") -> Path:
    """Return the agent's folder; the first call trains it (see `cache.made_once`)."""
    sources = [__file__, Path(__file__).with_name("tiny_tasks.py")]
    return made_once(f"tiny-agent-{size}", sources, lambda folder: build_tiny_agent(folder, size))
