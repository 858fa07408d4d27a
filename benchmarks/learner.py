"""Measure B11, and hold what trainers need to be measured: data, settings, a reward, a clock."""

import math
import tempfile
import time
from random import Random
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from agent_vllm.testing import ScriptedRolloutEngine
from benchmarks.figures import Figure, at_most, ratios
from benchmarks.work import TOOL, Setup, conversations, lookup, setup
from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

NUM_GENERATIONS = 4


def settings(batch_size: int, num_steps: int, output_dir: str) -> dict[str, Any]:
    """Return the arguments of `GRPOConfig`, the same on all sides."""
    return {
        "output_dir": output_dir,
        "max_steps": num_steps,
        "per_device_train_batch_size": batch_size,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": 800,
        "shuffle_dataset": False,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }


def trainer_arguments(ours: Setup, batch_size: int) -> dict[str, Any]:
    tasks = conversations(batch_size // NUM_GENERATIONS) * 8
    return {
        "model": ours.model,
        "reward_funcs": random_reward,
        "train_dataset": Dataset.from_list([{"prompt": task} for task in tasks]),
        "processing_class": ours.tokenizer,
        "tools": [lookup],
    }


def random_reward(completions: list[Any], **_: Any) -> list[float]:
    random = Random(0)
    return [random.random() for _ in completions]


class Clock(TrainerCallback):
    """Measure the seconds of every step, sync included; set each step's tool latency."""

    def __init__(self, latencies: list[str]) -> None:
        self._latencies = latencies
        self._starts: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        TOOL.latency = self._latencies[len(self._starts)]
        self._starts.append(time.perf_counter())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._starts.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        pairs = zip(self._starts, self._starts[1:], strict=False)
        return [end - start for start, end in pairs]


def old_logprobs(quick: bool) -> list[Figure]:
    """Measure B11: a step's learner time with the sampler's logprobs and with recomputed ones."""
    batch_size, num_steps = (4, 1) if quick else (64, 3)
    ours = setup()
    seconds: dict[str, list[float]] = {"sampler": [], "recomputed": []}
    for _ in range(1 if quick else 2):
        for name, values in seconds.items():
            values.append(_learner_seconds(ours, name, batch_size, num_steps))
    note = ", ".join(f"{name} {min(values):.3g} s a step" for name, values in seconds.items())
    return [
        Figure(
            id="B11",
            what="learner time of a GRPO step: sampler's logprobs / recomputed, same batch",
            goal=at_most(0.8),
            values=ratios(seconds["sampler"], seconds["recomputed"]),
            note=note,
        )
    ]


def _learner_seconds(ours: Setup, old_logprobs: str, batch_size: int, num_steps: int) -> float:
    """Return the seconds of one step without rollout and sync; the first step warms up."""
    clock = Clock(["none"] * (num_steps + 1))
    args = settings(batch_size, num_steps + 1, tempfile.mkdtemp())
    trainer = AgentGRPOTrainer(
        **trainer_arguments(ours, batch_size),
        args=AgentGRPOConfig(
            **args,
            old_logprobs=old_logprobs,
            rollout_progress=False,
            max_logprob_gap=math.inf,  # the script's logprobs are made up
        ),
        rollout_engine=ScriptedRolloutEngine(ours.tokenizer, ours.script, max_model_len=1024),
        callbacks=[clock],
    )
    warmed_up: dict[str, float] = {}

    class AfterFirst(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 1:
                warmed_up.update(trainer.seconds)

    trainer.add_callback(AfterFirst())
    trainer.train()
    elsewhere = sum(trainer.seconds.values()) - sum(warmed_up.values())
    return (sum(clock.seconds[1:]) - elsewhere) / num_steps
