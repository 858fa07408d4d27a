"""The checks: each builds what it needs, raises if something is wrong, and returns facts.

Models are random, from a config, or the tiny agent, which is trained when it is first needed.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tiny_agent import tiny_agent_path
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agent_vllm import RolloutEngine, VLLMRolloutEngine, VLLMServerRolloutEngine
from agent_vllm.engines.learner import gap_bound
from agent_vllm.engines.models import evaluating
from agent_vllm.engines.server.launcher import serve_command, serve_environment
from agent_vllm.training import LogprobGap, logprob_gap, predicted_logprobs
from agent_vllm.types import Completion
from benchmarks.runner import versions

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
BFLOAT16 = torch.bfloat16
NUM_SYNCS = 3
PORT = 8765

Facts = dict[str, Any]
Learner = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    run: Callable[[torch.device], Facts]
    limit_s: float = 110
    on_cpu: bool = False


# ---- what the checks share ----


def tiny_agent(size: str = "small") -> Learner:
    path = tiny_agent_path(size)
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def qwen3(**sizes: Any) -> Learner:
    """A random Qwen3; its tokenizer is the tiny agent's, which knows fewer ids."""
    torch.manual_seed(0)
    config = Qwen3Config(**{"tie_word_embeddings": True, "max_position_embeddings": 4096, **sizes})
    return Qwen3ForCausalLM(config), tiny_agent()[1]


def qwen3_80m() -> Learner:
    return qwen3(
        vocab_size=8192, hidden_size=640, intermediate_size=1920, num_hidden_layers=12,
        num_attention_heads=10, num_key_value_heads=5, head_dim=64,
    )  # fmt: skip


def qwen3_600m() -> Learner:
    return qwen3(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip


def moe() -> Learner:
    torch.manual_seed(0)
    tokenizer = tiny_agent()[1]
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=128, moe_intermediate_size=64,
        intermediate_size=128, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config), tokenizer


def ready(learner: Learner, device: torch.device, dtype: torch.dtype) -> Learner:
    model, tokenizer = learner
    return cast(PreTrainedModel, model.to(device=device, dtype=dtype)).eval(), tokenizer


def engine_of(learner: Learner, **options: Any) -> VLLMRolloutEngine:
    return VLLMRolloutEngine(
        *learner, **{"max_model_len": 512, "gpu_memory_utilization": 0.2, **options}
    )


def sample(engine: RolloutEngine, prompts: Sequence[list[int]]) -> list[Completion]:
    async def sample_all() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(p, max_new_tokens=48, seed=i) for i, p in enumerate(prompts))
        )

    return asyncio.run(sample_all())


def gap(engine: RolloutEngine, model: PreTrainedModel, autocast: bool = False) -> LogprobGap:
    """Sample 16 completions; compare them with a plain forward pass, if need be under autocast."""
    prompts = [[5 + 7 * i + j for j in range(4 + 3 * i)] for i in range(16)]
    ours, learners = [], []
    for prompt, sampled in zip(prompts, sample(engine, prompts), strict=True):
        ids = torch.tensor([prompt + sampled.token_ids], device=model.device)
        cast_to = torch.autocast(model.device.type, BFLOAT16, enabled=autocast)
        with evaluating(model), cast_to:
            logprobs = predicted_logprobs(model(input_ids=ids).logits, ids)
        learners.append(logprobs[0, len(prompt) - 1 :].cpu())
        ours += sampled.logprobs
    engines = torch.tensor([ours])
    return logprob_gap(engines, torch.cat(learners)[None], torch.ones_like(engines))


def bounded(found: LogprobGap, engine: VLLMRolloutEngine, model: PreTrainedModel) -> Facts:
    bound = gap_bound(engine.dtype, model.dtype, device=model.device)
    assert bound.holds(found), f"{found}; {bound} are normal"
    return {"mean": found.mean, "worst": found.max}


def ways(engine: VLLMRolloutEngine) -> Facts:
    """Which of vLLM's code the engine runs."""
    config = engine._stepper._llm.vllm_config
    return {
        "v2_runner": config.use_v2_model_runner,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "graphs": str(config.compilation_config.cudagraph_mode),
    }


@torch.no_grad()
def change(model: PreTrainedModel, scale: float = 0.02) -> None:
    """Change every weight, without waiting for the GPU."""
    for p in model.parameters():
        p.add_(torch.randn_like(p) * p.float().abs().mean().to(p.dtype) * scale)


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- the checks ----


def environment(device: torch.device) -> Facts:
    """Versions, and the platform that vLLM takes."""
    from vllm.platforms import current_platform

    assert current_platform.device_type == device.type, current_platform.device_type
    return {
        **versions(),
        "cuda": torch.version.cuda,
        "device": current_platform.get_device_name() if device.type == "cuda" else "cpu",
    }


def follows(
    learner: Callable[[], Learner], dtype: torch.dtype, **options: Any
) -> Callable[[torch.device], Facts]:
    """The engine follows three changes of all weights, and its memory comes back."""

    def run(device: torch.device) -> Facts:
        model, tokenizer = ready(learner(), device, dtype)
        before, start_s = free_bytes(device), time.perf_counter()
        engine = engine_of((model, tokenizer), **options)
        facts: Facts = {"build_s": time.perf_counter() - start_s}
        facts |= {"engine_gib": (before - free_bytes(device)) / GIB, **ways(engine)}
        facts["gaps"] = [bounded(gap(engine, model), engine, model)]
        facts["sync_s"] = []
        for _ in range(NUM_SYNCS):
            change(model)
            finish(device)
            start_s = time.perf_counter()
            engine.update_policy(model)
            facts["sync_s"].append(time.perf_counter() - start_s)
            facts["gaps"].append(bounded(gap(engine, model), engine, model))
        facts["sync_bytes"] = engine.num_synced_bytes
        first, again = (sample(engine, [[5, 7, 11]])[0].token_ids for _ in range(2))
        assert first == again, "the same seed gave other tokens"
        engine.close()
        facts["held_gib"] = (before - free_bytes(device)) / GIB
        assert facts["held_gib"] < 1, facts
        return facts

    return run


def autocast(device: torch.device) -> Facts:
    """A float32 learner under bfloat16 autocast against a bfloat16 engine."""
    learners = {"tiny agent, small": tiny_agent, "random, 80M": qwen3_80m}
    learners["tiny agent"] = lambda: tiny_agent("full")
    with contextlib.suppress(FileNotFoundError):  # its package is not installed everywhere
        from smollm2 import smollm2_path

        path = smollm2_path()
        learners["SmolLM2-135M-Instruct"] = lambda: (
            AutoModelForCausalLM.from_pretrained(path),
            AutoTokenizer.from_pretrained(path),
        )
    facts: Facts = {}
    for name, learner in learners.items():
        model, tokenizer = ready(learner(), device, torch.float32)
        with engine_of((model, tokenizer), dtype="bfloat16") as engine:
            facts[name] = bounded(gap(engine, model, autocast=True), engine, model)
    return facts


def stream_order(device: torch.device) -> Facts:
    """Weights that change behind half a second of GPU work arrive; the learner's state stays."""
    model, tokenizer = ready(tiny_agent(), device, BFLOAT16)
    random_state, precision = torch.cuda.get_rng_state(), torch.get_float32_matmul_precision()
    gaps = []
    with engine_of((model, tokenizer), engine_args={"enforce_eager": True}) as engine:
        assert torch.equal(torch.cuda.get_rng_state(), random_state)
        assert torch.get_float32_matmul_precision() == precision
        for _ in range(NUM_SYNCS):
            torch.cuda._sleep(int(1e9))
            change(model, 0.3)
            engine.update_policy(model)
            gaps.append(bounded(gap(engine, model), engine, model))
    return {"gaps": gaps}


def aborts(device: torch.device) -> Facts:
    """Half of the requests are aborted; the next sync finds no block still held."""
    learner = ready(tiny_agent(), device, BFLOAT16)

    async def cut(engine: RolloutEngine) -> list[Completion | BaseException]:
        tasks = [
            asyncio.create_task(engine.generate([5, 7, 11], max_new_tokens=300, seed=seed))
            for seed in range(64)
        ]
        await asyncio.sleep(0.1)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with engine_of(learner) as engine:
        kinds = [type(outcome).__name__ for outcome in asyncio.run(cut(engine))]
        engine.update_policy(learner[0])
    assert set(kinds) <= {"Completion", "CancelledError"}, set(kinds)
    return {kind: kinds.count(kind) for kind in set(kinds)}


def lora(device: torch.device) -> Facts:
    """The adapter is sent alone, and a closed engine holds no memory."""
    from peft import LoraConfig, get_peft_model

    model, tokenizer = ready(tiny_agent(), device, BFLOAT16)
    before = free_bytes(device)
    learner: Any = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    engine = engine_of((learner, tokenizer))
    for parameter in learner.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    engine.update_policy(learner)
    facts = {**bounded(gap(engine, model), engine, model), "sync_bytes": engine.num_synced_bytes}
    engine.close()
    facts["held_gib"] = (before - free_bytes(device)) / GIB
    assert facts["held_gib"] < 1, facts
    return facts


def sleep(device: torch.device) -> Facts:
    """Memory falls while the engine sleeps, three times; waking it up is exact."""
    model, tokenizer = ready(qwen3_600m(), device, BFLOAT16)
    freed, gaps = [], []
    with engine_of((model, tokenizer), sleep_mode=True) as engine:
        awake = free_bytes(device)
        for _ in range(NUM_SYNCS):
            engine.sleep()
            freed.append((free_bytes(device) - awake) / GIB)
            change(model)
            engine.update_policy(model)
            gaps.append(bounded(gap(engine, model), engine, model))
    assert min(freed) > 1, freed
    return {"freed_gib": freed, "gaps": gaps}


def train(*arguments: str) -> Callable[[torch.device], Facts]:
    """Five steps of the example; its agent still solves tasks afterwards."""

    def run(device: torch.device) -> Facts:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / "examples" / "train_tool_agent.py")]
            command += ["--max_steps", "5", "--num_eval_tasks", "50", "--output_dir", folder]
            command += (
                arguments if device.type == "cuda" else ["--per_device_train_batch_size", "16"]
            )
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-1500:]
            summary = json.loads((Path(folder) / "summary.json").read_text())
        facts = {"seconds": summary["seconds"], "success": summary["after"]["greedy"]["success"]}
        assert facts["success"] > 0.3, facts  # 0 if it was asked while asleep
        return facts

    return run


def server(device: torch.device) -> Facts:
    """A server on the same device gets weights through memory; NCCL can't join one GPU twice."""
    dtype = BFLOAT16 if device.type == "cuda" else torch.float32
    model, tokenizer = ready(tiny_agent(), device, dtype)
    command = serve_command(
        tiny_agent_path("small"), port=PORT, dtype=str(dtype), max_model_len=512,
        gpu_memory_utilization=0.2,
        vllm_args=["--weight-transfer-config", '{"backend": "trainer_memory"}'],
    )  # fmt: skip
    url = f"http://127.0.0.1:{PORT}"
    with (
        serving(command) as is_alive,
        contextlib.closing(connected(model, tokenizer, url, is_alive)) as engine,
    ):
        change(model)
        start_s = time.perf_counter()
        engine.update_policy(model)
        seconds = time.perf_counter() - start_s
        found = gap(engine, model)
    bound = gap_bound(dtype, device=device)
    assert bound.holds(found), found
    return {"mean": found.mean, "worst": found.max, "sync_s": seconds}


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[Callable[[], bool]]:
    environment = serve_environment(os.environ)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield lambda: process.poll() is None
    finally:
        process.terminate()
        process.wait(30)


def connected(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    url: str,
    is_alive: Callable[[], bool],
) -> VLLMServerRolloutEngine:
    """Return an engine over the server, as soon as it answers."""
    while True:
        try:
            return VLLMServerRolloutEngine(model, tokenizer, base_urls=[url])
        except Exception:
            if not is_alive():
                raise
            time.sleep(1)


CHECKS = {
    "environment": Check(run=environment, on_cpu=True),
    "bf16": Check(run=follows(tiny_agent, BFLOAT16), on_cpu=True),
    "fp32": Check(run=follows(tiny_agent, torch.float32), on_cpu=True),
    "eager": Check(run=follows(tiny_agent, BFLOAT16, engine_args={"enforce_eager": True})),
    "0.6b": Check(run=follows(qwen3_600m, BFLOAT16)),
    "moe": Check(run=follows(moe, BFLOAT16), on_cpu=True),
    "autocast": Check(run=autocast, limit_s=180, on_cpu=True),
    "stream order": Check(run=stream_order),
    "aborts": Check(run=aborts, on_cpu=True),
    "lora": Check(run=lora, on_cpu=True),
    "sleep": Check(run=sleep),
    "server": Check(run=server, limit_s=120, on_cpu=True),
    "train": Check(run=train("--bf16", "True"), limit_s=150, on_cpu=True),
    "train with sleep": Check(
        run=train("--bf16", "True", "--vllm_enable_sleep_mode", "True"), limit_s=150
    ),
}
