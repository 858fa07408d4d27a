"""Build the workload: conversations whose turns, lengths and tool latencies are fixed by a seed.

Owns the script that every engine follows, so that all sides generate the same tokens. A logits
processor makes every vLLM engine sample the script; the torch engine samples as many tokens as the
script has, and the script's tokens replace them. Invariant: a turn depends on
its prompt alone.
"""

import functools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from smollm2 import smollm2_path
from tiny_agent import tiny_agent_path
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agent_vllm import ChatFormat, Completion, Limits, TorchRolloutEngine, VLLMRolloutEngine
from agent_vllm.engines.base import GenerationRequest

NUM_TOOL_TURNS = 3
LIMITS = Limits(max_turns=NUM_TOOL_TURNS + 1)
MAX_FILLER_TOKENS = 64
TEXT = "It is a fine day in Oslo and the price of the book is low . " * 40


# ---- models ----


def model_folder(name: str) -> Path:
    """Return the folder of `tiny` (half a million parameters) or `135M` (SmolLM2)."""
    return tiny_agent_path("small") if name == "tiny" else smollm2_path()


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in float32, with its tokenizer. `0.5B` has random weights."""
    if name == "0.5B":
        return random_half_billion(), AutoTokenizer.from_pretrained(model_folder("tiny"))
    folder = model_folder(name)
    return (
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        AutoTokenizer.from_pretrained(folder),
    )


def random_half_billion() -> PreTrainedModel:
    """Build a model of Qwen3-0.6B's shape with a small vocabulary and random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


# ---- tools ----


@dataclass(kw_only=True)
class ToolState:
    """Set how long `lookup` takes and how much it returns."""

    latency: str = "none"  # "none", "log-normal" or seconds as text
    num_words: int = 2

    def seconds(self, key: str) -> float:
        """Return the latency of a call; log-normal has a median of 0.3 s and is cut at 3 s."""
        if self.latency == "log-normal":
            return min(0.3 * Random(f"latency {key}").lognormvariate(0.0, 1.0), 3.0)
        return 0.0 if self.latency == "none" else float(self.latency)


TOOL = ToolState()


def lookup(key: str) -> str:
    """Looks a key up.

    Args:
        key: The key.
    """
    seconds = TOOL.seconds(key)
    if seconds:
        time.sleep(seconds)
    return " ".join(TEXT.split()[: TOOL.num_words])


# ---- conversations ----


def conversations(num_tasks: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"Task {task}."}] for task in range(num_tasks)]


@dataclass(frozen=True, kw_only=True)
class Script:
    """Hold the turns of "Task n.": three calls, each after some words, and an answer."""

    tokenizer: PreTrainedTokenizerBase
    turns: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def __call__(self, request: GenerationRequest) -> list[int]:
        return self.turn_after(request.prompt_ids)

    def turn_after(self, prompt_ids: Sequence[int]) -> list[int]:
        turn = self.after(prompt_ids)
        assert turn is not None, "a prompt without a task"
        return turn

    def after(self, prompt_ids: Sequence[int]) -> list[int] | None:
        """Return the ids of the next turn, `[N]`; None for a prompt without a task."""
        text = self.tokenizer.backend_tokenizer.decode(list(prompt_ids[:64]))
        task = re.search(r"Task (\d+)\.", text)
        if task is None:
            return None
        num_messages = prompt_ids.count(self.tokenizer.eos_token_id)  # each ends with it
        return self.turn(task[1], max(num_messages - 2, 0) // 2)

    def turn(self, task: str, index: int) -> list[int]:
        key = (task, index)
        if key not in self.turns:
            self.turns[key] = self._write(f"{task}-{index}", is_call=index < NUM_TOOL_TURNS)
        return self.turns[key]

    def _write(self, key: str, *, is_call: bool) -> list[int]:
        words = self._words[: Random(f"length {key}").randint(1, MAX_FILLER_TOKENS)]
        call = f'\n<tool_call>\n{{"name": "lookup", "arguments": {{"key": "{key}"}}}}\n</tool_call>'
        rest = self._encode(call) if is_call else self._words[:20]
        return [*words, *rest, self.tokenizer.eos_token_id]

    @functools.cached_property
    def _words(self) -> list[int]:
        return self._encode(TEXT)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def seconds_alone(self, task: int) -> float:
        """Estimate a trajectory's time, to find the slowest: tools, and 3 ms per token."""
        turns = [self.turn(str(task), index) for index in range(NUM_TOOL_TURNS + 1)]
        tools = sum(TOOL.seconds(f"{task}-{index}") for index in range(NUM_TOOL_TURNS))
        return tools + 0.003 * sum(map(len, turns))


def forcing(script: Script) -> type:
    """Return a vLLM logits processor class that leaves only the script's next token."""
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

    class Forcing(LogitsProcessor):
        def __init__(self, *_: Any) -> None:
            self.rows: dict[int, tuple[list[int], list[int]]] = {}  # turn, sampled so far

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            if batch_update is None:
                return
            for index in batch_update.removed:
                self.rows.pop(index, None)
            for index, _, prompt_ids, sampled in batch_update.added:
                turn = script.after(prompt_ids or [])
                self.rows.pop(index, None)
                if turn is not None:
                    self.rows[index] = (turn, sampled)
            for a, b, how in batch_update.moved:
                row_a, row_b = self.rows.pop(a, None), self.rows.pop(b, None)
                if row_a is not None:
                    self.rows[b] = row_a
                if row_b is not None and how is MoveDirectionality.SWAP:
                    self.rows[a] = row_b

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            if self.rows:
                rows = list(self.rows)
                tokens = [turn[len(sampled)] for turn, sampled in self.rows.values()]
                logits[rows] = -torch.inf
                logits[rows, tokens] = 0.0
            return logits

    return Forcing


@dataclass(kw_only=True)
class Setup:
    """Hold a model with its chat format and script."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    script: Script

    def vllm(self, **options: Any) -> VLLMRolloutEngine:
        engine_args = {"logits_processors": [forcing(self.script)]}
        return VLLMRolloutEngine(self.model, self.tokenizer, engine_args=engine_args, **options)


def setup(name: str = "tiny") -> Setup:
    model, tokenizer = load_model(name)
    return Setup(
        model=model,
        tokenizer=tokenizer,
        chat=ChatFormat.from_tokenizer(tokenizer),
        script=Script(tokenizer=tokenizer),
    )


# ---- engines that keep to lengths ----


class ScriptedTorchEngine(TorchRolloutEngine):
    """Sample as many tokens as the script's turn has, and return the script's."""

    script: Script

    async def _sample(self, request: GenerationRequest) -> Completion:
        turn = self.script(request)
        free = replace(request, max_new_tokens=len(turn), stop_token_ids=())
        completion = await super()._sample(free)
        return replace(completion, token_ids=turn, finish_reason="stop")


class _FixedLengths:
    """Sample completions of given lengths; an engine mixin."""

    lengths: Mapping[tuple[int, ...], int]

    async def _sample(self, request: GenerationRequest) -> Completion:
        num_tokens = self.lengths.get(tuple(request.prompt_ids), request.max_new_tokens)
        free = replace(request, max_new_tokens=num_tokens, stop_token_ids=())
        completion = await super()._sample(free)  # type: ignore[misc]
        return replace(completion, finish_reason="stop")


class FixedLengthVLLM(_FixedLengths, VLLMRolloutEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        add_request = self._stepper._llm.add_request

        def add(request_id: str, prompt: Any, params: Any, **options: Any) -> str:
            params.ignore_eos = True  # vLLM also ends on what the checkpoint's config names
            return add_request(request_id, prompt, params, **options)

        self._stepper._llm.add_request = add


class FixedLengthTorch(_FixedLengths, TorchRolloutEngine):
    pass


def uneven_prompts(
    setup: Setup, num_prompts: int, lengths: tuple[int, int]
) -> tuple[list[list[dict[str, str]]], list[list[int]], list[int]]:
    """Return conversations without tools, their ids, and how many tokens to sample for each."""
    random = Random("uneven")
    words = TEXT.split()
    messages = [
        [{"role": "user", "content": f"Task {i}. {' '.join(words[: random.randint(5, 80)])}"}]
        for i in range(num_prompts)
    ]
    ids = [setup.chat.prompt_ids(conversation) for conversation in messages]
    return messages, ids, [random.randint(*lengths) for _ in ids]
