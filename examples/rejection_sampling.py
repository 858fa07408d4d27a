"""One round of rejection sampling: sample, keep what was right, fine-tune on exactly those tokens.

    python examples/rejection_sampling.py
    python examples/rejection_sampling.py --engine torch --num_tasks 50

The record of the rollouts becomes rows with `agent-vllm export --to sft --where ...`, here by its
function, and TRL's `SFTTrainer` trains on them. The success of the tiny agent is printed before and
after.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tiny_tasks
from datasets import load_dataset
from tiny_agent import tiny_agent_path
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

from agent_vllm import ChatFormat, Limits, Trajectory, create_rollout_engine, rollout_batch
from agent_vllm.record import RolloutRecorder
from agent_vllm.record.export import write_parquet

TOOLS = [tiny_tasks.calculator, tiny_tasks.get_weather, tiny_tasks.get_price]
LIMITS = Limits(max_turns=4, max_completion_tokens=160)


@dataclass
class ScriptArguments:
    """Options of this script."""

    engine: str = field(default="vllm", metadata={"help": "`vllm` or `torch`."})
    num_tasks: int = field(default=200, metadata={"help": "Tasks to sample."})
    num_samples: int = field(default=8, metadata={"help": "Samples of each task."})
    where: str = field(
        default="correct >= 1", metadata={"help": "Which trajectories are fine-tuned on."}
    )
    output_dir: str = field(default="runs/rejection-sampling", metadata={"help": "Folder."})


def rewards_of(trajectories: Sequence[Trajectory], rows: Sequence[dict]) -> list[float]:
    """Return 1.0 for each solved task."""
    completions = [trajectory.completion_messages for trajectory in trajectories]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    return tiny_tasks.correct_reward(completions=completions, **columns)


def main() -> None:
    [script] = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    folder = Path(script.output_dir)
    record, dataset = folder / "rollouts.jsonl", folder / "sft.parquet"
    record.unlink(missing_ok=True)
    path = tiny_agent_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = ChatFormat.from_tokenizer(tokenizer)
    test_rows = tiny_tasks.make_tasks("test", 200)
    tasks = tiny_tasks.make_tasks("train", script.num_tasks)
    rows = [row for row in tasks for _ in range(script.num_samples)]

    with create_rollout_engine(script.engine, model, tokenizer, max_model_len=1024) as engine:

        def roll_out(rows: Sequence[dict], seed: int) -> list[Trajectory]:
            prompts = [row["prompt"] for row in rows]
            return rollout_batch(
                engine, chat, prompts, [TOOLS] * len(rows), limits=LIMITS, seed=seed
            )

        def success() -> float:
            return sum(rewards_of(roll_out(test_rows, 0), test_rows)) / len(test_rows)

        before = success()
        trajectories = roll_out(rows, 1)
        with RolloutRecorder(record, tokenizer=tokenizer) as recorder:
            for trajectory, reward in zip(
                trajectories, rewards_of(trajectories, rows), strict=True
            ):
                recorder.write(trajectory, rewards={"correct": reward})
        num_kept = write_parquet(record, dataset, to="sft", where=script.where)
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                str(folder),
                max_length=None,  # longer rows would be cut
                per_device_train_batch_size=32,
                learning_rate=1e-4,
                num_train_epochs=2,
                logging_steps=5,
                save_strategy="no",
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
            ),
            train_dataset=load_dataset("parquet", data_files=str(dataset), split="train"),
            processing_class=tokenizer,
        )
        trainer.train()
        engine.update_policy(model)
        after = success()
    print(f"{num_kept} of {len(rows)} trajectories are fine-tuned on")
    print(f"success on {len(test_rows)} held-out tasks: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
