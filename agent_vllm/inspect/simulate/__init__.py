"""Predicts step time and idle shares for a layout of engines and learner; runs nothing.

A rollout is a queue of trajectories that alternate between a shared engine and tools of their own:
`workload.py` says what is rolled out, `rates.py` how fast an engine is, `engine.py` plays it out,
`step.py` adds learner and sync, `sync.py` knows bytes and links, `recorded.py` takes all that a
recorded run can tell from its file. Invariant: the same input and seed, the same prediction.
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
