"""Measure B2 and B12: stock TRL, with vLLM in its process and its own tool loop, and our trainer.

TRL's sync raises on the CPU build of vLLM, which repacks weights after loading. TRL gets our sync
and the script's logits processor; nothing else of it is changed. Invariant: both sides train the
same model on the same rows with the same settings.
"""

import os
import tempfile
from functools import partial
from typing import Any

from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from agent_vllm.engines.learner import LearnerWeights
from agent_vllm.engines.vllm.host_state import host_process_kept
from benchmarks.figures import Figure, at_least, at_most, seconds_of
from benchmarks.learner import Clock, settings, trainer_arguments
from benchmarks.work import Setup, forcing, model_folder, setup
from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

LENT = "TRL is lent our weight sync"


class _Timed:
    """Measure the wall time of every rollout, TRL's `_generate`; a trainer mixin."""

    rollout_seconds: list[float]

    def _generate(self, prompts: Any) -> Any:
        outcome: list[Any] = []
        generate = super()._generate  # type: ignore[misc]
        self.rollout_seconds.append(seconds_of(lambda: outcome.append(generate(prompts))))
        return outcome[0]


class TimedOurs(_Timed, AgentGRPOTrainer):
    pass


class TimedTRL(_Timed, GRPOTrainer):
    pass


def rollout_wall(quick: bool) -> list[Figure]:
    """Measure B2: one step's rollouts with log-normal tools; each side's first step warms up."""
    latencies = ["none", "0.01"] if quick else ["none", "log-normal"]
    ours, theirs = _both(4 if quick else 64, latencies, repeat_ours=1 if quick else 2)
    a, b = ours.rollout_seconds[1:], theirs.rollout_seconds[1:]
    note = f"TRL {b[0]:.3g} s, ours {min(a):.3g} s; {LENT}"
    return [
        Figure(
            id="B2", what="64 trajectories by stock TRL's tool loop, vLLM colocated: TRL / ours",
            goal=at_least(10), values=[b[0] / seconds for seconds in a], note=note,
        )
    ]  # fmt: skip


def step_wall(quick: bool) -> list[Figure]:
    """Measure B12: a whole GRPO step with tools of 0.2 s."""
    latencies = ["none", "0.01"] if quick else ["none", "0.2"]
    ours, theirs = _both(4 if quick else 64, latencies, repeat_ours=1 if quick else 2)
    a, b = ours.clock.seconds[1:], theirs.clock.seconds[1:]
    note = f"ours {min(a):.3g} s, TRL {b[0]:.3g} s; {LENT}"
    return [
        Figure(
            id="B12", what="one whole GRPO step, tools of 0.2 s: ours / stock TRL with vLLM",
            goal=at_most(0.25), values=[seconds / b[0] for seconds in a], note=note,
        )
    ]  # fmt: skip


def _both(batch_size: int, latencies: list[str], repeat_ours: int = 1) -> tuple[Any, Any]:
    """Train with ours, then with TRL; each side has the process's cores to itself."""
    setups = setup(), setup()
    with tempfile.TemporaryDirectory() as folder, setups[0].vllm() as engine:
        ours = _train_ours(
            setups[0], engine, batch_size, latencies + latencies[1:] * (repeat_ours - 1), folder
        )
        return ours, _train_trl(setups[1], batch_size, latencies, folder)


def _train_ours(
    ours: Setup, engine: Any, batch_size: int, latencies: list[str], folder: str
) -> Any:
    clock = Clock(latencies)
    trainer = TimedOurs(
        **trainer_arguments(ours, batch_size),
        args=AgentGRPOConfig(
            **settings(batch_size, len(latencies), folder), rollout_progress=False
        ),
        rollout_engine=engine,
        callbacks=[clock],
    )
    trainer.clock, trainer.rollout_seconds = clock, []
    trainer.train()
    return trainer


def _train_trl(theirs: Setup, batch_size: int, latencies: list[str], folder: str) -> Any:
    from trl.generation import vllm_generation

    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB, as ours has at most
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    theirs.model = AutoModelForCausalLM.from_pretrained(model_folder("tiny"), dtype="float32")
    vllm_generation.LLM = partial(
        vllm_generation.LLM, dtype="float32", logits_processors=[forcing(theirs.script)]
    )
    vllm_generation.VLLMGeneration.sync_weights = lent_sync
    clock = Clock(latencies)
    with host_process_kept():
        trainer = TimedTRL(
            **trainer_arguments(theirs, batch_size),
            args=GRPOConfig(
                **settings(batch_size, len(latencies), folder),
                use_vllm=True,
                vllm_mode="colocate",
                vllm_max_model_length=1024,
            ),
            callbacks=[clock],
        )
    trainer.clock, trainer.rollout_seconds = clock, []
    trainer.train()
    return trainer


def lent_sync(generation: Any) -> None:
    """Sync weights in place of `VLLMGeneration.sync_weights`."""
    weights = dict(LearnerWeights(generation.model).tensors())
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights.items()})
    assert generation.llm.reset_prefix_cache()
