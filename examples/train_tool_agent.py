"""Train a tool-using agent with GRPO, with rollouts by vLLM in this process, on CPU or GPU.

    python examples/train_tool_agent.py                                      # the tiny agent
    python examples/train_tool_agent.py --engine torch
    python examples/train_tool_agent.py --engine vllm-server --servers http://127.0.0.1:8000
    python examples/train_tool_agent.py --model smollm2 --data bfcl --warm-start --max-steps 3
    accelerate launch examples/train_tool_agent.py --model Qwen/Qwen3-0.6B --data bfcl

Every setting of `AgentGRPOConfig`, and so of TRL's `GRPOConfig`, is an option of this script:
`--max_turns 6`, `--learning_rate 1e-5`, `--old_logprobs recomputed`. `--config settings.yaml` reads
them from a file.
"""

import os

# On shared cores, OpenMP threads that spin while they wait slow each other down tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import json
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from plots import plot_run
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import TrlParser

from agent_vllm import Tool, Trajectory, rollout_batch
from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

DESCRIPTION = "Train a tool-using agent with GRPO, with rollouts by vLLM, on CPU or GPU."
OTHER_OPTIONS = (
    "Every setting of AgentGRPOConfig, and so of TRL's GRPOConfig, is an option as well, such as "
    "--max_steps 50 --max_turns 6 --learning_rate 1e-5 --output_dir runs/mine. --config FILE.yaml "
    "reads them from a file. They are described in TRL's documentation of GRPOConfig and in the "
    "docstring of AgentGRPOConfig (trl_integration/config.py)."
)

Row = dict[str, Any]
Reward = Callable[..., list[float]]


@dataclass
class ScriptArguments:
    """Options of this script; all settings of `AgentGRPOConfig` are options as well."""

    model: str = field(
        default="tiny", metadata={"help": "`tiny`, `smollm2`, or a Hugging Face id or path."}
    )
    data: str = field(
        default="tiny", metadata={"help": "Tasks to train on.", "choices": ["tiny", "bfcl"]}
    )
    engine: str = field(
        default="vllm",
        metadata={
            "help": "Engine that samples the rollouts.",
            "choices": ["vllm", "torch", "vllm-server"],
        },
    )
    servers: list[str] | None = field(
        default=None,
        metadata={
            "help": "URLs of running servers (`agent-vllm serve`), for `--engine vllm-server`."
        },
    )
    warm_start: bool = field(
        default=False,
        metadata={"help": "Fine-tune on correct calls of `bfcl` training rows first."},
    )
    control: str | None = field(
        default=None,
        metadata={
            "help": "Control run: shuffle the advantages of each batch. It must not improve.",
            "choices": ["shuffled-advantages"],
        },
    )
    num_eval_tasks: int | None = field(
        default=None,
        metadata={"help": "Held-out tasks before and after training; default: 200, for `bfcl` 20."},
    )
    compare_with: str | None = field(
        default=None, metadata={"help": "`summary.json` of another run to show in the final table."}
    )


# ---- data: tasks, tools and rewards ----


@dataclass(frozen=True, kw_only=True)
class Job:
    """Hold tasks, their tools and their rewards.

    `rewards[0]` is 1.0 for a solved task.
    """

    train_rows: list[Row]
    test_rows: list[Row]
    tools: Any  # a list, or a function from a row to the row's list
    rewards: list[Reward]
    defaults: Mapping[str, Any]  # settings of `AgentGRPOConfig`

    def row_tools(self, row: Row) -> Sequence[Any]:
        return self.tools(row) if callable(self.tools) else self.tools


def tiny_job(num_eval_tasks: int = 200) -> Job:
    """Build the tiny job: calculator, weather, prices and small talk (`tiny_tasks.make_tasks`)."""
    import tiny_tasks

    return Job(
        train_rows=tiny_tasks.make_tasks("train", 2000),
        test_rows=tiny_tasks.make_tasks("test", num_eval_tasks),
        tools=[tiny_tasks.calculator, tiny_tasks.get_weather, tiny_tasks.get_price],
        rewards=[tiny_tasks.correct_reward, tiny_tasks.format_reward],
        defaults={
            "output_dir": "runs/tiny-agent",
            "max_steps": 50,
            "learning_rate": 3e-4,
            "per_device_train_batch_size": 128,
            "num_generations": 8,
            "max_completion_length": 160,
            "max_turns": 4,
            "bf16": False,
            "gradient_checkpointing": False,
        },
    )


def bfcl_job(num_eval_tasks: int = 20) -> Job:
    """Build the BFCL job: single calls; each row has its own functions."""
    import bfcl

    def tools(row: Row) -> list[Tool]:
        return [Tool(schema=schema, function=call) for schema, call in bfcl.row_tools(row)]

    return Job(
        train_rows=bfcl.load_bfcl("train", max_prompt_chars=600),
        test_rows=bfcl.load_bfcl("test", num_eval_tasks, max_prompt_chars=600),
        tools=tools,
        rewards=[bfcl.call_reward, bfcl.format_reward],
        defaults={
            "output_dir": "runs/bfcl",
            "learning_rate": 2e-6,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 8,
            "max_completion_length": 128,
            "max_turns": 2,
            "bf16": torch.cuda.is_available(),
            "gradient_checkpointing": torch.cuda.is_available(),
        },
    )


JOBS: dict[str, Callable[..., Job]] = {"tiny": tiny_job, "bfcl": bfcl_job}


def model_folder(name: str, warm_start: bool) -> str:
    """Return a path or id that transformers loads; built-in models are made on first use."""
    if name == "tiny":
        from tiny_agent import tiny_agent_path

        return str(tiny_agent_path())
    if name == "smollm2":
        from smollm2 import smollm2_path

        name = str(smollm2_path())
    if not warm_start:
        return name
    import bfcl
    from cache import made_once

    source = name
    return str(
        made_once(
            f"{Path(name).name}-warm",
            [bfcl.__file__],
            lambda folder: bfcl.warm_start(source, folder),
        )
    )


# ---- training ----


class ShuffledAdvantagesTrainer(AgentGRPOTrainer):
    """Give each sample the advantage of another one: a control that must not learn."""

    def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        order = list(range(len(output["advantages"])))
        random.Random(self.state.global_step).shuffle(order)
        output["advantages"] = output["advantages"][order]
        return output


class BriefProgress(ProgressCallback):
    """Show the main metrics on TRL's bar; `trainer_state.json` has all of them."""

    shown = ("reward", "reward_std", "completions/mean_length", "rollout/turns", "loss")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        brief = {name: logs[name] for name in self.shown if name in logs}
        if brief:
            super().on_log(args, state, control, logs=brief, **kwargs)


def build_trainer(script: ScriptArguments, args: AgentGRPOConfig, job: Job) -> AgentGRPOTrainer:
    path = model_folder(script.model, script.warm_start)
    if script.servers:
        args.rollout_engine_kwargs = {"base_urls": script.servers}
    trainer_class = ShuffledAdvantagesTrainer if script.control else AgentGRPOTrainer
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
        reward_funcs=job.rewards,
        args=args,
        train_dataset=Dataset.from_list(job.train_rows),
        processing_class=AutoTokenizer.from_pretrained(path),
        tools=job.tools,
        rollout_engine=script.engine,
    )
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(BriefProgress)
    return trainer


def evaluate(trainer: AgentGRPOTrainer, job: Job, temperature: float) -> dict[str, float]:
    """Roll out each held-out task once, with the weights that the engine holds."""
    rows = job.test_rows
    trajectories = rollout_batch(
        trainer.rollout_engine,
        trainer.chat_format,
        [row["prompt"] for row in rows],
        [job.row_tools(row) for row in rows],
        limits=trainer.args.limits(),
        temperature=temperature,
        seed=0,
    )
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    completions = [trajectory.completion_messages for trajectory in trajectories]
    solved = job.rewards[0](completions=completions, **columns)
    return {
        "success": sum(solved) / len(rows),
        "well_formed": well_formed_share(trajectories),
        "mean_turns": sum(t.num_turns for t in trajectories) / len(rows),
        "num_tasks": len(rows),
    }


def well_formed_share(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of drafted calls that could run; 0 if none was drafted."""
    statuses = [result.status for t in trajectories for result in t.tool_results]
    return sum(status != "invalid" for status in statuses) / max(len(statuses), 1)


def evaluate_both(trainer: AgentGRPOTrainer, job: Job) -> dict[str, Any]:
    trainer.sync_engine()
    return {**evaluate(trainer, job, 1.0), "greedy": evaluate(trainer, job, 0.0)}


# ---- results ----


def reward_curve(trainer: AgentGRPOTrainer) -> list[dict[str, float]]:
    keys = ("step", "reward", "reward_std")
    logs = [log for log in trainer.state.log_history if "reward" in log]
    return [{key: log[key] for key in keys} for log in logs]


def print_table(summary: Mapping[str, Any], other: Mapping[str, Any] | None) -> None:
    table = Table(title=f"{summary['num_eval_tasks']} held-out tasks, temperature 1")
    for heading in ("", "success", "greedy success", "well-formed calls", "mean turns"):
        table.add_column(heading, justify="left" if not heading else "right")
    for run in filter(None, (other, summary)):
        name = "control" if run["control"] else "training"
        for when in ("before", "after"):
            scores = run[when]
            table.add_row(
                f"{when} {name}",
                f"{scores['success']:.3f}",
                f"{scores['greedy']['success']:.3f}",
                f"{scores['well_formed']:.3f}",
                f"{scores['mean_turns']:.2f}",
            )
    Console().print(table)


def run(script: ScriptArguments, args: AgentGRPOConfig, job: Job) -> None:
    start_s = time.perf_counter()
    output_dir = Path(args.output_dir)
    trainer = build_trainer(script, args, job)
    try:
        before = evaluate_both(trainer, job)
        set_up_s = time.perf_counter() - start_s
        earlier = trainer.seconds
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        train_s = time.perf_counter() - start_s - set_up_s
        in_training = {name: s - earlier[name] for name, s in trainer.seconds.items()}
        learn_s = train_s - sum(in_training.values())
        seconds = {"set_up": set_up_s, **in_training, "learn": learn_s}
        after = evaluate_both(trainer, job)
        trainer.save_model(str(output_dir / "final"))
    finally:
        trainer.close()
    if not trainer.accelerator.is_main_process:
        return
    summary = {
        "engine": script.engine,
        "model": script.model,
        "data": script.data,
        "control": script.control,
        "steps": trainer.state.global_step,
        "num_eval_tasks": len(job.test_rows),
        "before": before,
        "after": after,
        "reward_curve": reward_curve(trainer),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = script.control or "training"
    plots = plot_run(trainer.state.log_history, output_dir, title)
    other = json.loads(Path(script.compare_with).read_text()) if script.compare_with else None
    print_table(summary, other)
    print(f"seconds: {summary['seconds']}, peak memory: {summary['peak_rss_mb']} MB")
    for path in (*(output_dir / n for n in ("summary.json", "rollouts.jsonl", "final")), *plots):
        print(f"wrote {path}")


def parse_arguments() -> tuple[ScriptArguments, AgentGRPOConfig, Job]:
    first = TrlParser(ScriptArguments, description=DESCRIPTION, epilog=OTHER_OPTIONS)
    script = first.parse_args_and_config(return_remaining_strings=True)[0]
    job = JOBS[script.data](*filter(None, [script.num_eval_tasks]))
    parser = TrlParser((ScriptArguments, AgentGRPOConfig))
    parser.set_defaults(
        **{
            "logging_steps": 1,
            "save_steps": 20,
            "save_total_limit": 2,
            "report_to": "none",
            "dataloader_pin_memory": torch.cuda.is_available(),
            "record_rollouts": True,
            **job.defaults,
        }
    )
    script, args = parser.parse_args_and_config()
    return script, args, job


def stop(*_: Any) -> None:
    """Handle SIGTERM, which schedulers send, like Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a script, in the background
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    script, args, job = parse_arguments()
    try:
        run(script, args, job)
    except KeyboardInterrupt:
        folder = Path(args.output_dir)
        last = get_last_checkpoint(folder) if folder.exists() else None
        hint = f"; resume with --resume-from-checkpoint {last}" if last else ""
        sys.exit(f"\nStopped. Checkpoints and rollouts so far are in {folder}{hint}")


if __name__ == "__main__":
    main()
