"""Run the command `agent-vllm replay`. It needs TRL's loss, so it belongs to this package."""

import argparse
import inspect
import json
import math
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_vllm.record import RolloutRecord, batch_name, read_batches
from agent_vllm.training import collate

if TYPE_CHECKING:
    from trl_integration.rescore import Rescored, RescoringTrainer

DESCRIPTION = (
    "Run reward functions, advantages and TRL's loss on recorded rollouts, without an engine. "
    "Lists every reward that differs from the recorded one; the exit status is then 1."
)
_MAX_LISTED = 20
_TENSORS = ("input_ids", "attention_mask", "completion_mask", "old_per_token_logps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "rollouts", type=Path, help="rollouts.jsonl or its export, or the folder of the run"
    )
    parser.add_argument(
        "--rewards", type=Path, required=True, help="Python file with reward functions"
    )
    parser.add_argument(
        "--functions",
        nargs="+",
        help="which of them (default: all public ones that take `completions`)",
    )
    parser.add_argument(
        "--model", help="the learner, path or id (default: its recorded logprobs stand in)"
    )
    parser.add_argument(
        "--config", type=json.loads, default={}, help="settings of AgentGRPOConfig as a JSON object"
    )


def run(args: argparse.Namespace) -> int:
    functions = reward_functions(args.rewards, args.functions)
    trainer = _trainer(functions, args.model, args.config)
    num_differences = 0
    for records in read_batches(args.rollouts):
        rescored = trainer.rescore(records)
        differences = list(_differences(records, rescored.rewards))
        num_differences += len(differences)
        print("\n".join(_report(records, rescored, differences)))
    names = ", ".join(function.__name__ for function in functions)
    print(f"{names}: {num_differences} rewards differ from the recorded ones")
    return 1 if num_differences else 0


def reward_functions(path: Path, names: Sequence[str] | None = None) -> list[Callable[..., Any]]:
    """Return the functions of a file: those named, or its public ones that take `completions`.

    Raises:
        SystemExit: a name is not in the file, or no function is.
    """
    if path.suffix != ".py" or not path.exists():
        raise SystemExit(f"`--rewards` must be a Python file, got {path}.")
    sys.path.insert(0, str(path.parent.resolve()))  # for what it imports from its neighbours
    found = {
        name: value
        for name, value in runpy.run_path(str(path), run_name=path.stem).items()
        if inspect.isfunction(value) and value.__module__ == path.stem and name[0] != "_"
    }
    missing = sorted(set(names or ()) - found.keys())
    if missing:
        raise SystemExit(f"{path} has no functions {missing}; it has {sorted(found)}.")
    takes = {n for n, f in found.items() if "completions" in inspect.signature(f).parameters}
    chosen = [found[name] for name in names or sorted(takes)]
    if not chosen:
        raise SystemExit(f"{path} has no function that takes `completions`; give `--functions`.")
    return chosen


def _trainer(
    functions: list[Callable[..., Any]], model: str | None, settings: dict[str, Any]
) -> "RescoringTrainer":
    """Build the trainer that scores; TRL is imported only when the command runs."""
    from trl_integration.rescore import RescoringTrainer, rescoring_config

    if model is None:
        return RescoringTrainer(functions, rescoring_config(**settings))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return RescoringTrainer(
        functions,
        rescoring_config(**settings),
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        AutoTokenizer.from_pretrained(model),
    )


def _differences(
    records: Sequence[RolloutRecord], rewards: Sequence[dict[str, float]]
) -> Iterator[str]:
    """Yield one line per reward that differs; a function that was not recorded has none."""
    for record, now in zip(records, rewards, strict=True):
        for name, value in now.items():
            new = None if math.isnan(value) else value
            old = record.rewards.get(name, new)
            if new != old:
                yield f"{record.id} {name}: recorded {old}, now {new}"


def _report(
    records: Sequence[RolloutRecord], rescored: "Rescored", differences: Sequence[str]
) -> Iterator[str]:
    num_groups = len({record.group for record in records})
    yield f"{batch_name(records[0])}: {len(records)} trajectories, {num_groups} prompts"
    for name in rescored.rewards[0]:
        scored = [row[name] for row in rescored.rewards if not math.isnan(row[name])]
        note = "" if name in records[0].rewards else ", not in the record"
        yield f"  {name}: mean {sum(scored) / max(len(scored), 1):.6g}{note}"
    yield from (f"  {line}" for line in differences[:_MAX_LISTED])
    if len(differences) > _MAX_LISTED:
        yield f"  and {len(differences) - _MAX_LISTED} more"
    yield from _tensors(records, rescored)
    num_known = sum(record.learner_logprobs is not None for record in records)
    yield f"  loss: {rescored.loss!r}, learner logprobs recorded for {num_known}/{len(records)}"


def _tensors(records: Sequence[RolloutRecord], rescored: "Rescored") -> Iterator[str]:
    batch = collate([record.trajectory for record in records], pad_token_id=0)
    yield "  tensors: " + ", ".join(
        f"{name} {list(getattr(batch, name).shape)}" for name in _TENSORS
    )
    num_prompt = sum(len(record.prompt_ids) for record in records)
    num_sampled = int(batch.completion_mask.sum())
    num_observed = int(batch.attention_mask.sum()) - num_prompt - num_sampled
    num_trained = int((rescored.inputs["completion_mask"] * rescored.inputs["tool_mask"]).sum())
    yield (
        f"  tokens: {num_prompt} prompt, {num_sampled} sampled, {num_observed} observed, "
        f"{num_trained} trained"
    )
