"""Predict step time and idle shares for a layout of engines and learner, without running them.

A rollout is a queue of trajectories. Each alternates between a shared engine and its own tools.
`workload.py` describes the trajectories, `rates.py` the engine's speed. `engine.py` simulates one
engine, `step.py` adds learner and sync. `sync.py` computes sync times from the constants of
`hardware.py`. `recorded.py` reads a recorded run. Invariant: the same input and seed give the same
prediction.
"""

from agent_vllm.inspect.simulate.engine import EngineRun, run_engine
from agent_vllm.inspect.simulate.rates import RateCurve
from agent_vllm.inspect.simulate.recorded import RecordedRun, read_run
from agent_vllm.inspect.simulate.step import Prediction, Setup, predict
from agent_vllm.inspect.simulate.sync import sync_seconds
from agent_vllm.inspect.simulate.workload import Turn, Workload, distribution

__all__ = [
    "EngineRun",
    "Prediction",
    "RateCurve",
    "RecordedRun",
    "Setup",
    "Turn",
    "Workload",
    "distribution",
    "predict",
    "read_run",
    "run_engine",
    "sync_seconds",
]
