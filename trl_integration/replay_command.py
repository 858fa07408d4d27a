"""Run reward functions, the collator and a GRPO loss on recorded rollouts, without an engine.

The exit status is 1 where a reward is not what was recorded.
"""

import argparse
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_vllm.batch import TrainingBatch, collate
from agent_vllm.record import RolloutRecord, batch_name, read_batches, to_trajectory

if TYPE_CHECKING:
    from trl_integration.rescore import Rescored, RescoringTrainer

_MAX_LISTED = 20
_TENSORS = ("input_ids", "attention_mask", "completion_mask", "old_per_token_logps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl of a run, or its export")
    parser.add_argument("--rewards", type=Path, required=True, help="file with reward functions")
    parser.add_argument(
        "--functions", nargs="+", help="their names; default: all that take `completions`"
    )
    parser.add_argument(
        "--model", help="learner, path or id; default: the learner's recorded logprobs"
    )
    parser.add_argument(
        "--config", type=json.loads, default={}, help="settings of AgentGRPOConfig, a JSON object"
    )


def run(args: argparse.Namespace) -> int:
    functions = reward_functions(args.rewards, args.functions)
    trainer = _trainer(functions, args.model, args.config)
    num_differences = 0
    for records in read_batches(args.rollouts):
        replayed = trainer.rescore(records)
        differences = list(_differences(records, replayed.rewards))
        num_differences += len(differences)
        batch = collate([to_trajectory(record) for record in records], pad_token_id=0)
        print("\n".join(_report(records, replayed, differences, batch)))
    names = ", ".join(function.__name__ for function in functions)
    print(f"{names}: {num_differences} rewards differ from the recorded ones")
    return 1 if num_differences else 0


def reward_functions(path: Path, names: Sequence[str] | None = None) -> list[Callable[..., Any]]:
    """The file's functions of these names; by default its public ones that take `completions`.

    Raises:
        SystemExit: a name that is not there, or no function at all.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"`--rewards` must be a Python file, got {path}.")
    sys.path.insert(0, str(path.parent.resolve()))  # for what it imports from its neighbours
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == path.stem and not name.startswith("_")
    }
    missing = sorted(set(names or ()) - found.keys())
    if missing:
        raise SystemExit(f"{path} has no functions {missing}; it has {sorted(found)}.")
    chosen = [found[name] for name in names or found if names or _is_reward(found[name])]
    if not chosen:
        raise SystemExit(f"{path} has no function that takes `completions`; give `--functions`.")
    return chosen


def _is_reward(function: Callable[..., Any]) -> bool:
    return "completions" in inspect.signature(function).parameters


def _trainer(
    functions: list[Callable[..., Any]], model: str | None, settings: dict[str, Any]
) -> "RescoringTrainer":
    """The loss is TRL's: this command is built on the trainer, and nothing else in here is."""
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
    """One line for each reward that was recorded otherwise; functions without a record pass."""
    for record, now in zip(records, rewards, strict=True):
        for name, value in now.items():
            new = None if math.isnan(value) else value
            old = record["rewards"].get(name, new)
            if new != old:
                yield f"{record['id']} {name}: recorded {old}, now {new}"


def _report(
    records: Sequence[RolloutRecord],
    replayed: "Rescored",
    differences: Sequence[str],
    batch: TrainingBatch,
) -> Iterator[str]:
    num_groups = len({record["group"] for record in records})
    yield f"{batch_name(records[0])}: {len(records)} trajectories, {num_groups} prompts"
    for name in replayed.rewards[0]:
        scored = [row[name] for row in replayed.rewards if not math.isnan(row[name])]
        note = "" if name in records[0]["rewards"] else ", not in the record"
        yield f"  {name}: mean {sum(scored) / max(len(scored), 1):.6g}{note}"
    yield from (f"  {line}" for line in differences[:_MAX_LISTED])
    if len(differences) > _MAX_LISTED:
        yield f"  and {len(differences) - _MAX_LISTED} more"
    shapes = (f"{name} {list(getattr(batch, name).shape)}" for name in _TENSORS)
    yield f"  tensors: {', '.join(shapes)}"
    yield f"  tokens: {_token_counts(records, replayed)}"
    num_known = sum(record["learner_logprobs"] is not None for record in records)
    yield f"  loss: {replayed.loss!r}, learner logprobs recorded for {num_known}/{len(records)}"


def _token_counts(records: Sequence[RolloutRecord], replayed: "Rescored") -> str:
    num_prompt = sum(len(record["prompt_ids"]) for record in records)
    num_sampled = sum(sum(record["completion_mask"]) for record in records)
    num_completion = sum(len(record["completion_ids"]) for record in records)
    num_trained = int((replayed.inputs["completion_mask"] * replayed.inputs["tool_mask"]).sum())
    return (
        f"{num_prompt} prompt, {num_sampled} sampled, {num_completion - num_sampled} observed, "
        f"{num_trained} trained"
    )
