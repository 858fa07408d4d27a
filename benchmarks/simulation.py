"""Measure S1 and S2: `agent-vllm simulate` against the clock, for rollouts and whole steps."""

import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agent_vllm.inspect.simulate import RateCurve, RecordedRun, Setup, Turn, predict, read_run
from agent_vllm.inspect.simulate.rates import fit_rates
from agent_vllm.inspect.simulate.recorded import timed_turns
from benchmarks.figures import Figure, at_most, medians, ratios, seconds_of
from benchmarks.learner import NUM_GENERATIONS, Clock, settings, trainer_arguments
from benchmarks.rollouts import reset_prefix_cache, rollout_all, run_all
from benchmarks.work import NUM_TOOL_TURNS, TOOL
from benchmarks.work import Setup as Work
from benchmarks.work import setup as make_setup
from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

MAX_NUM_SEQS = 128


def rollouts(quick: bool) -> list[Figure]:
    """Measure S1: each round fits the engine's rate, then measures the rollouts it predicts."""
    return _rollouts(4, 1) if quick else _rollouts(64, 3)


def _rollouts(num_tasks: int, num_rounds: int) -> list[Figure]:
    ours = make_setup()
    latencies = ["none", "0.2", "log-normal"]
    seconds: dict[str, list[float]] = {latency: [] for latency in latencies}
    found: dict[str, list[float]] = {latency: [] for latency in latencies}
    with ours.vllm(max_num_seqs=MAX_NUM_SEQS) as engine:
        rollout_all(engine, ours, num_tasks, "none")
        for _ in range(num_rounds):
            rate = measured_rate(engine, ours, num_tasks)
            for latency in latencies:
                run = partial(run_all, engine, ours, num_tasks, latency)
                seconds[latency].append(seconds_of(run))
                found[latency].append(_predicted_s(ours, num_tasks, latency, rate))
    return [
        _figure(f"S1 {latency}", f"rollout, tools {latency}", found[latency], seconds[latency])
        for latency in latencies
    ]


def measured_rate(engine: Any, ours: Work, num_tasks: int) -> RateCurve:
    """Fit the rate to rollouts of 1, 4, 16, ... trajectories without tool latency."""
    sizes = [size for size in (1, 4, 16, 64) if size <= num_tasks]
    turns = []
    for size in sizes:
        reset_prefix_cache(engine)
        turns.append(timed_turns(rollout_all(engine, ours, size, "none")))
    return fit_rates(turns)


def _predicted_s(ours: Work, num_tasks: int, latency: str, rate: RateCurve) -> float:
    """Predict from the script's lengths and latencies alone, without the measured rollout."""
    layout = Setup(layout="shared", rate=rate, max_num_seqs=MAX_NUM_SEQS)
    return predict([scripted_plans(ours, num_tasks, latency)], layout).rollout_s


def scripted_plans(ours: Work, num_tasks: int, latency: str) -> list[Sequence[Turn]]:
    TOOL.latency = latency
    return [
        [
            Turn(
                len(ours.script.turn(str(task), turn)),
                TOOL.seconds(f"{task}-{turn}") if turn < NUM_TOOL_TURNS else 0.0,
            )
            for turn in range(NUM_TOOL_TURNS + 1)
        ]
        for task in range(num_tasks)
    ]


# ---- whole steps ----


def steps(quick: bool) -> list[Figure]:
    """Measure S2: recorded GRPO steps with one latency predict the steps with the other."""
    num_tasks, num_rounds = (4, 1) if quick else (64, 3)
    latencies = ["none", *["0.05", "log-normal"] * num_rounds, "0.05"]
    ours = make_setup()
    with tempfile.TemporaryDirectory() as folder:
        clock = _train(ours, num_tasks, latencies, folder)
        recorded = read_run(Path(folder) / "rollouts.jsonl")
    rows = []
    for first, latency, other in ((2, "log-normal", 1), (1, "0.05", 2)):
        seen = _every_second(recorded, other)
        layout = Setup(
            layout="shared", rate=seen.rate(), max_num_seqs=MAX_NUM_SEQS,
            learner_s=seen.learner_s() or 0.0,
        )  # fmt: skip
        tasks = scripted_plans(ours, num_tasks // NUM_GENERATIONS, latency)
        found = predict([tasks * NUM_GENERATIONS], layout).step_s
        measured = clock.seconds[first:-1:2]
        what = f"whole GRPO step, tools {latency}, from steps with others"
        rows.append(_figure(f"S2 {latency}", what, [found] * len(measured), measured))
    return rows


def _every_second(recorded: RecordedRun, first: int) -> RecordedRun:
    return RecordedRun(
        rollouts=recorded.rollouts[first::2],
        rollout_s=recorded.rollout_s[first::2],
        timed_turns=recorded.timed_turns[first::2],
        between_s=recorded.between_s[first::2],
    )


def _train(ours: Work, num_tasks: int, latencies: list[str], folder: str) -> Clock:
    clock = Clock(latencies)
    with ours.vllm(max_num_seqs=MAX_NUM_SEQS) as engine:
        run = AgentGRPOTrainer(
            **trainer_arguments(ours, num_tasks),
            args=AgentGRPOConfig(
                **settings(num_tasks, len(latencies), folder),
                rollout_progress=False,
                record_rollouts=True,
            ),
            rollout_engine=engine,
            callbacks=[clock],
        )
        run.train()
        run.close()
    return clock


def _figure(id_: str, what: str, found: Sequence[float], measured: Sequence[float]) -> Figure:
    distance = abs(statistics.median(ratios(found, measured)) - 1)
    return Figure(
        id=id_, what=f"{what}: predicted / measured, distance from 1", goal=at_most(0.15),
        values=[distance], note=medians({"predicted": found, "measured": measured}),
    )  # fmt: skip
