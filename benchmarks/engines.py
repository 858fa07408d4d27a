"""Measure B4, B5, B7 and B8: the engine against bare vLLM, other engines, a memcpy, defaults."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from agent_vllm import Limits, VLLMRolloutEngine, rollout_batch
from agent_vllm.engines.learner import LearnerWeights
from agent_vllm.engines.vllm import cpu
from benchmarks.figures import (
    SHOWN,
    Figure,
    at_least,
    at_most,
    in_turns,
    medians,
    ratios,
)
from benchmarks.rollouts import reset_prefix_cache
from benchmarks.work import (
    FixedLengthTorch,
    FixedLengthVLLM,
    Setup,
    load_model,
    model_folder,
    setup,
    uneven_prompts,
)

ONE_TURN = Limits(max_turns=1)

# ---- B4 ----


def against_bare_generate(quick: bool) -> list[Figure]:
    """Measure B4: tokens per second against `vllm.LLM.generate`, with and without seeds."""
    ours = setup()
    prompts = uneven_prompts(ours, 4 if quick else 128, (8, 16) if quick else (64, 256))
    with FixedLengthVLLM(ours.model, ours.tokenizer) as engine:
        bare = BareVLLM(engine_arguments(engine, ours), *prompts[1:])
        sides = {
            "ours": lambda: one_turn(engine, ours, *prompts),
            "bare": bare.generate,
            "bare, seeded": lambda: bare.generate(seeded=True),
        }
        in_turns(sides, 1)
        seconds = in_turns(sides, 1 if quick else 3)
    note = f"{sum(prompts[2])} tokens; {medians(seconds)}"
    return [
        Figure(
            id="B4", what="no tools, a seed a request: ours / bare LLM.generate, tokens per second",
            goal=at_least(0.97), values=ratios(seconds["bare, seeded"], seconds["ours"]), note=note,
        ),
        Figure(
            id="B4 unseeded", what="the same, bare generate without seeds: not reproducible",
            goal=at_least(0.97), values=ratios(seconds["bare"], seconds["ours"]),
        ),
    ]  # fmt: skip


def one_turn(engine: Any, ours: Setup, messages: Any, ids: Any, lengths: list[int]) -> None:
    engine.lengths = {tuple(row): n for row, n in zip(ids, lengths, strict=True)}
    if isinstance(engine, VLLMRolloutEngine):
        reset_prefix_cache(engine)
    trajectories = rollout_batch(engine, ours.chat, messages, limits=ONE_TURN)
    assert sum(t.num_sampled_tokens for t in trajectories) == sum(lengths)


def engine_arguments(engine: VLLMRolloutEngine, ours: Setup) -> dict[str, Any]:
    """Return our engine's arguments, so that the other side differs only in how it is driven."""
    from agent_vllm.engines.vllm.options import VLLMOptions

    options = VLLMOptions(
        dtype=torch.float32, max_model_len=engine.max_model_len, max_num_seqs=128,
        gpu_memory_utilization=0.3, kv_cache_memory_bytes=None, further={},
    )  # fmt: skip
    return options.engine_args(ours.model.config, on_cpu=cpu.is_cpu())


class BareVLLM:
    """Run `vllm.LLM.generate` in this process, with all prompts in one call, as in vLLM's docs."""

    def __init__(
        self, arguments: dict[str, Any], prompts: list[list[int]], lengths: list[int]
    ) -> None:
        from agent_vllm.engines.vllm.host_state import host_process_kept

        with host_process_kept():
            from vllm import LLM

            self._llm = LLM(model=str(model_folder("tiny")), **{**arguments, "runner": "auto"})
        self._prompts = [{"prompt_token_ids": ids} for ids in prompts]
        self._lengths = lengths

    def generate(self, *, seeded: bool = False) -> None:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                max_tokens=n, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
                seed=index if seeded else None,
            )
            for index, n in enumerate(self._lengths)
        ]  # fmt: skip
        assert self._llm.reset_prefix_cache()
        outputs = self._llm.generate(self._prompts, parameters, use_tqdm=False)
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == sum(self._lengths)


# ---- B5 ----


def against_torch(quick: bool) -> list[Figure]:
    """Measure B5: useful tokens per second against the torch engine and a padded `generate`."""
    small = (4, (4, 8), 1)
    figures = _against_torch("tiny", at_least(2.5), *(small if quick else (64, (16, 128), 3)))
    if quick:
        return figures
    return figures + _against_torch("135M", at_least(3.5), 24, (8, 48), 2)


def _against_torch(
    name: str, goal: Any, num_prompts: int, lengths: tuple[int, int], num_rounds: int
) -> list[Figure]:
    ours = setup(name)
    prompts = uneven_prompts(ours, num_prompts, lengths)
    limits: dict[str, Any] = {"max_model_len": 1024}
    with (
        FixedLengthVLLM(ours.model, ours.tokenizer, **limits) as engine,
        FixedLengthTorch(ours.model, ours.tokenizer, **limits) as torch_engine,
    ):
        one_turn(engine, ours, *prompts)
        seconds = in_turns(
            {
                "vllm": lambda: one_turn(engine, ours, *prompts),
                "torch": lambda: one_turn(torch_engine, ours, *prompts),
                "generate": lambda: padded_generate(ours, *prompts[1:]),
            },
            num_rounds,
        )
    useful = f"{sum(prompts[2])} tokens; {medians(seconds)}"
    return [
        Figure(
            id=f"B5 {name}", what="vLLM engine / torch engine, uneven lengths, tokens per second",
            goal=goal, values=ratios(seconds["torch"], seconds["vllm"]), note=useful,
        ),
        Figure(
            id=f"B5 {name} generate", what="vLLM engine / padded transformers generate",
            goal=goal, values=ratios(seconds["generate"], seconds["vllm"]),
        ),
    ]  # fmt: skip


def padded_generate(ours: Setup, ids: list[list[int]], lengths: list[int]) -> None:
    """Generate one left-padded batch to the longest row's length, with the scores of every step."""
    from agent_vllm.training import pad_rows

    ours.model.generate(
        input_ids=pad_rows(ids, 0, side="left"),
        attention_mask=pad_rows([[1] * len(row) for row in ids], 0, side="left"),
        do_sample=True,
        min_new_tokens=max(lengths),
        max_new_tokens=max(lengths),
    )


# ---- B7 ----


def weight_sync(quick: bool) -> list[Figure]:
    """Measure B7: a sync against a memcpy of the same bytes, and packed against unpacked."""
    figures = []
    for name in ["tiny"] if quick else ["tiny", "135M", "0.5B"]:
        figures += _weight_sync(name, 3 if quick or name != "tiny" else 10)
    return figures if quick else [*figures, _whole_step()]


def _weight_sync(name: str, num_rounds: int) -> list[Figure]:
    model, tokenizer = load_model(name)
    weights = dict(LearnerWeights(model).tensors())
    tensors = list({weight.data_ptr(): weight for weight in weights.values()}.values())  # tied once
    copies = [torch.zeros_like(tensor) for tensor in tensors]

    def memcpy() -> None:
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)

    options = {"max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}
    with VLLMRolloutEngine(model, tokenizer, **options) as packed:
        seconds = in_turns(
            {"sync": lambda: packed.update_policy(model), "memcpy": memcpy}, num_rounds
        )
    note = f"{sum(tensor.nbytes for tensor in tensors) >> 20} MiB; {medians(seconds)}"
    if name == "tiny":
        milliseconds = [1000 * s for s in seconds["sync"]]
        return [
            Figure(
                id="B7 tiny", what="one weight sync", goal=at_most(15), values=milliseconds,
                unit="ms", note=note,
            )
        ]  # fmt: skip
    return [
        Figure(
            id=f"B7 {name}", what="one sync / one memcpy of the same bytes (<= 2, or the step)",
            goal=SHOWN, values=ratios(seconds["sync"], seconds["memcpy"]), note=note,
        )
    ]  # fmt: skip


def _whole_step() -> Figure:
    """Measure a sync plus the tokens of a small step, with unpacked and with packed weights."""
    ours = setup("135M")
    prompts = uneven_prompts(ours, 16, (32, 64))
    options = {"max_model_len": 512}
    packed = FixedLengthVLLM(ours.model, ours.tokenizer, **options)
    limit, cpu.UNPACKED_LIMIT = cpu.UNPACKED_LIMIT, 1 << 40
    unpacked = FixedLengthVLLM(ours.model, ours.tokenizer, **options)
    cpu.UNPACKED_LIMIT = limit

    def step(engine: FixedLengthVLLM) -> None:
        engine.update_policy(ours.model)
        one_turn(engine, ours, *prompts)

    with unpacked, packed:
        seconds = in_turns(
            {
                "repacked": lambda: step(packed),
                "copied": lambda: step(unpacked),
                "copied sync": lambda: unpacked.update_policy(ours.model),
            },
            2,
        )
    return Figure(
        id="B7 135M step", what=f"sync and {sum(prompts[2])} tokens: repacked / copied weights",
        goal=at_most(1), values=ratios(seconds["repacked"], seconds["copied"]),
        note=medians(seconds),
    )  # fmt: skip


# ---- B8 ----

_OURS = """
from agent_vllm import VLLMRolloutEngine
import asyncio
engine = VLLMRolloutEngine(folder)
asyncio.run(engine.generate([5, 6, 7], max_new_tokens=1))
"""
_DEFAULTS = """
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(folder)
    llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=1, logprobs=0))
"""


def start_up(quick: bool) -> list[Figure]:
    """Measure B8: from a process that has loaded the learner to the first token."""
    folder = str(model_folder("tiny"))
    ours = [_fresh_process(_OURS, folder)]
    figures = [
        Figure(
            id="B8 seconds", what="engine built to first token, tiny agent",
            goal=at_most(8), values=ours, unit="s",
        )
    ]  # fmt: skip
    if quick:
        return figures
    first_s, defaults_s = _fresh_process(_DEFAULTS, folder), _fresh_process(_DEFAULTS, folder)
    ours += [_fresh_process(_OURS, folder), _fresh_process(_OURS, folder)]
    figures.append(
        Figure(
            id="B8 defaults", what="vLLM's defaults / ours, to the first token with logprobs",
            goal=at_least(4), values=[defaults_s / seconds for seconds in ours],
            note=f"defaults {defaults_s:.3g} s, its start before that {first_s:.3g} s",
        )
    )  # fmt: skip
    return figures


def _fresh_process(code: str, folder: str) -> float:
    """Return the seconds that `code` takes in a process that has loaded the learner."""
    lines = [
        "import time, torch",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"folder = {folder!r}",
        'if __name__ == "__main__": learner = AutoModelForCausalLM.from_pretrained(folder)',
        "start_s = time.perf_counter()",
        code,
        'if __name__ == "__main__": print("seconds", time.perf_counter() - start_s, flush=True)',
    ]
    # The default size of the cache is nearly all of the machine's memory, which others may hold.
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": os.getcwd()}
    with tempfile.TemporaryDirectory() as scripts:
        script = Path(scripts) / "start.py"  # vLLM's own processes import it again
        script.write_text("\n".join(lines))
        process = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, env=environment
        )
    found = [line.split()[1] for line in process.stdout.splitlines() if line.startswith("seconds ")]
    if not found:
        raise RuntimeError(f"A start failed: {process.stderr[-2000:]}")
    return float(found[0])
