"""Measure L1 to L6: a learner's forward and backward pass on TRL's rows, and on prefix trees.

Both sides use TRL's fused head on the same rows and weigh the same logprobs.

Legend: B rows, P prompt, C completion, T = P + C.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from agent_vllm import ChatFormat, Limits, TorchRolloutEngine, rollout_batch
from agent_vllm.record import read_rollouts
from agent_vllm.training import PrefixTree, pad_rows, tree_inputs, use_tree_attention
from benchmarks.figures import (
    SHOWN,
    Figure,
    at_least,
    at_most,
    cpu_seconds_of,
    in_turns,
    medians,
    ratios,
)
from benchmarks.learner import Clock

RECORD = Path(__file__).parent.parent / "runs" / "tiny-agent" / "rollouts.jsonl"  # of `make train`
Row = tuple[list[int], list[int]]  # prompt and completion


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Hold rows as TRL pads them."""

    input_ids: torch.Tensor  # [B, T]
    attention_mask: torch.Tensor  # [B, T]
    num_columns: int  # C

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Batch":
        prompts, completions = zip(*rows, strict=True)
        ids = [pad_rows(prompts, 0, "left"), pad_rows(completions, 0)]
        ones = [[[1] * len(row) for row in part] for part in (prompts, completions)]
        mask = [pad_rows(ones[0], 0, "left"), pad_rows(ones[1], 0)]
        return cls(
            input_ids=torch.cat(ids, 1),
            attention_mask=torch.cat(mask, 1),
            num_columns=ids[1].shape[1],
        )

    def tree(self) -> PrefixTree:
        return PrefixTree.of_rows(self.input_ids, self.attention_mask)

    @property
    def token_ratio(self) -> float:
        tree = self.tree()
        return tree.num_row_tokens / tree.num_tokens


def learner(model: PreTrainedModel) -> PreTrainedModel:
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    use_tree_attention(model, longest_row=0)
    return model.train()


def on_rows(model: PreTrainedModel, batch: Batch) -> None:
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    labels[:, : -batch.num_columns] = -100
    out: Any = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        labels=labels,
        fused_lm_head=True,
    )
    _backward(model, out.log_probs[:, -batch.num_columns :])


def on_tree(model: PreTrainedModel, batch: Batch) -> None:
    tree = batch.tree()
    is_scored = torch.zeros_like(tree.is_real)
    is_scored[:, -batch.num_columns :] = True
    out: Any = model(**tree_inputs(tree), shift_labels=tree.labels(is_scored), fused_lm_head=True)
    _backward(model, tree.by_row(out.log_probs)[:, -batch.num_columns :])


def _backward(model: PreTrainedModel, logprobs: torch.Tensor) -> None:
    model.zero_grad()
    weights = torch.randn(len(logprobs), 1, generator=torch.Generator().manual_seed(0))
    (logprobs * weights).mean().backward()


def compare(
    id_: str, what: str, goal: float, model: PreTrainedModel, batch: Batch, num_rounds: int
) -> list[Figure]:
    """Return the ratio of CPU times, A B A B; short steps are warmed up."""
    sides: dict[str, Callable[[], None]] = {
        "rows": lambda: on_rows(model, batch),
        "tree": lambda: on_tree(model, batch),
    }
    if num_rounds > 2:
        in_turns(sides, 1)
    seconds = in_turns(sides, num_rounds, cpu_seconds_of)
    values = ratios(seconds["rows"], seconds["tree"])
    tokens = batch.token_ratio
    note = f"{medians(seconds)}; {tokens:.3g} times fewer tokens"
    return [
        Figure(
            id=id_, what=f"{what}: rows / tree, CPU time", goal=at_least(goal), values=values,
            note=note,
        ),
        Figure(
            id=f"{id_} share", what=f"{what}: time ratio / token ratio",
            goal=at_least(1.0) if id_ == "L2" else SHOWN,
            values=[value / tokens for value in values],
        ),
    ]  # fmt: skip


# ---- rows ----


def recorded_batches() -> dict[str, Batch]:
    """Return the first, middle and last batch of `make train`."""
    if not RECORD.exists():
        raise FileNotFoundError(f"{RECORD} is missing. Run `make train` first.")
    steps: dict[int, list[Row]] = {}
    for record in read_rollouts(RECORD):
        if record["mode"] == "train":
            row = record["prompt_ids"], record["completion_ids"]
            steps.setdefault(record["step"], []).append(row)
    numbers = sorted(steps)
    picked = (numbers[0], numbers[len(numbers) // 2], numbers[-1])
    return {f"step {number}": Batch.of(steps[number]) for number in picked}


def tiny_agent() -> PreTrainedModel:
    from tiny_agent import tiny_agent_path

    return learner(AutoModelForCausalLM.from_pretrained(tiny_agent_path(), dtype="float32"))


def random_model() -> PreTrainedModel:
    """Build a model of 80 million parameters with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=768, intermediate_size=2304, num_hidden_layers=10,
        num_attention_heads=12, num_key_value_heads=6, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    return learner(Qwen3ForCausalLM(config))


def one_prompt(quick: bool) -> Batch:
    """Return L2's shape: P 1024, C 128, G 8."""
    num_prompt, num_completion, num_rows = (64, 8, 2) if quick else (1024, 128, 8)
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(8192, (num_prompt,), generator=draw).tolist()
    completions = torch.randint(8192, (num_rows, num_completion), generator=draw).tolist()
    return Batch.of([(prompt, completion) for completion in completions])


# ---- L1 to L6 ----


def recorded(quick: bool) -> list[Figure]:
    """Measure L1."""
    model = tiny_agent()
    return [
        figure
        for name, batch in recorded_batches().items()
        for figure in compare(
            f"L1 {name}", "a recorded batch of `make train`", 3.0, model, batch, 1 if quick else 5
        )
    ]


def long_prompt(quick: bool) -> list[Figure]:
    """Measure L2."""
    what = "P 1024, C 128, G 8 on a random 80M model"
    return compare("L2", what, 4.5, random_model(), one_prompt(quick), 1 if quick else 2)


def bfcl(quick: bool) -> list[Figure]:
    """Measure L3: real rollouts of SmolLM2 on the longest prompt of its tasks."""
    import bfcl
    from smollm2 import smollm2_path

    from agent_vllm import Tool

    folder = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    row = max(bfcl.load_bfcl("train"), key=lambda row: len(row["functions"]))
    tools = [Tool(schema=schema, function=call) for schema, call in bfcl.row_tools(row)]
    with TorchRolloutEngine(model, tokenizer) as engine:
        trajectories = rollout_batch(
            engine,
            ChatFormat.from_tokenizer(tokenizer),
            [row["prompt"]],
            [tools],
            num_generations=2 if quick else 8,
            limits=Limits(max_turns=3, max_new_tokens=64, max_completion_tokens=192),
            seed=0,
        )
    batch = Batch.of([(t.prompt_ids, t.completion_ids) for t in trajectories])
    what = "a BFCL prompt with its tool schemas on SmolLM2-135M, G 8"
    return compare("L3", what, 2.5, learner(model), batch, 1)


def building(quick: bool) -> list[Figure]:
    """Measure L4 on a batch of `make train`, which has the most rows."""
    batch, model = list(recorded_batches().values())[1], tiny_agent()
    sides = {"build": batch.tree, "step": lambda: on_tree(model, batch)}
    in_turns(sides, 1)
    seconds = in_turns(sides, 1 if quick else 5, cpu_seconds_of)
    return [
        Figure(
            id="L4", what="building the tree / the step, which it is a part of", goal=at_most(0.05),
            values=ratios(seconds["build"], seconds["step"]), note=medians(seconds),
        )
    ]  # fmt: skip


def memory(quick: bool) -> list[Figure]:
    """Measure L5: each side in a process of its own, which has the model and no gradients."""
    model, batch = random_model(), one_prompt(quick)
    peaks = {side: _peak_of(side, model, batch) for side in (on_rows, on_tree)}
    return [
        Figure(
            id="L5", what="peak memory of a step in L2's shape, gradients included: tree / rows",
            goal=at_most(0.6), values=[peaks[on_tree] / peaks[on_rows]],
            note=", ".join(f"{side.__name__} {peak / 1e6:.0f} MB" for side, peak in peaks.items()),
        )
    ]  # fmt: skip


def _peak_of(side: Callable[..., None], model: PreTrainedModel, batch: Batch) -> float:
    """Return the bytes that a step adds to a forked process at its peak."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is in use
        before = _resident("VmRSS")
        side(model, batch)
        send.send(_resident("VmHWM") - before)

    process = context.Process(target=work)
    process.start()
    peak = receive.recv()
    process.join()
    return peak


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def whole_step(quick: bool) -> list[Figure]:
    """Measure L6: steps of `make train`, rollout and sync included, after one that warms up."""
    num_steps = 1 if quick else 4
    seconds: dict[str, list[float]] = {"off": [], "auto": []}
    for _ in range(1 if quick else 2):
        for choice, values in seconds.items():
            values.append(median(_step_seconds(choice, num_steps)))
    return [
        Figure(
            id="L6", what='whole step of `make train`: shared_prefix "off" / "auto", wall',
            goal=at_least(2.0), values=ratios(seconds["off"], seconds["auto"]),
            note=medians(seconds),
        )
    ]  # fmt: skip


def _step_seconds(shared_prefix: str, num_steps: int) -> list[float]:
    from datasets import Dataset
    from tiny_agent import tiny_agent_path
    from train_tool_agent import tiny_job

    from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

    job, clock = tiny_job(), Clock(["none"] * (num_steps + 1))
    with tempfile.TemporaryDirectory() as folder:
        args = AgentGRPOConfig(
            **{
                **job.defaults,
                "output_dir": folder,
                "max_steps": num_steps + 1,
                "shared_prefix": shared_prefix,
                "report_to": "none",
                "save_strategy": "no",
                "disable_tqdm": True,
                "dataloader_pin_memory": False,
            }
        )
        trainer = AgentGRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny_agent_path(), dtype="float32"),
            reward_funcs=job.rewards,
            args=args,
            train_dataset=Dataset.from_list(job.train_rows),
            processing_class=AutoTokenizer.from_pretrained(tiny_agent_path()),
            tools=job.tools,
            rollout_engine="vllm",
            callbacks=[clock],
        )
        trainer.train()
        trainer.close()
    return clock.seconds[1:]
