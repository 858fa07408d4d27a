"""Simulate training steps in a layout: rollout, learner, sync, one after the other.

Invariant: the shares of every device add up to 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from agent_vllm.errors import ScenarioError
from agent_vllm.inspect.simulate.engine import EngineRun, run_engine
from agent_vllm.inspect.simulate.rates import RateCurve
from agent_vllm.inspect.simulate.workload import Plan, with_tools

Layout = Literal["shared", "beside", "servers"]
LAYOUTS = get_args(Layout)
_FREE = RateCurve(((1, math.inf),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Describe the engines and the learner.

    Attributes:
        layout: `"shared"`: each engine takes turns with a learner process on one device.
            `"beside"` and `"servers"`: engines have their own devices, on the learner's node or
            elsewhere; these two differ in sync time only.
        rate: speed of one engine.
        max_num_seqs: sequences that run in one engine at a time.
        num_engines: trajectories are assigned round-robin and stay on their engine.
        learner_s: seconds for rewards, loss and optimizer, on the slowest process.
        sync_s: seconds to send the weights to all engines; `"shared"` includes sleep and wake-up.
    """

    layout: Layout
    rate: RateCurve
    max_num_seqs: int = 128
    num_engines: int = 1
    learner_s: float = 0.0
    sync_s: float = 0.0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ScenarioError(f"`layout` must be one of {LAYOUTS}, got {self.layout!r}.")
        for name in ("max_num_seqs", "num_engines"):
            if getattr(self, name) < 1:
                raise ScenarioError(f"`{name}` must be 1 or more, got {getattr(self, name)}.")
        for name in ("learner_s", "sync_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ScenarioError(f"`{name}` must be 0 or more, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Split a device's time into shares that add up to 1."""

    sampling: float
    training: float
    sync: float
    idle: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Hold means over the simulated rollouts.

    Attributes:
        rollout_s, learner_s, sync_s, step_s: seconds; the first three add up to the last.
        tokens_per_s: sampled tokens per second of step time, over all engines.
        mean_running: mean number of sequences in a busy engine.
        mean_queued: mean number of sequences in its queue during the rollout.
        engine_bound_s: rollout time if tools took no time.
        tool_bound_s: rollout time if tokens took no time.
        shares: per device: `"engine"` and `"learner"`, or one `"device"` if they share it.
    """

    num_engines: int
    rollout_s: float
    learner_s: float
    sync_s: float
    step_s: float
    tokens_per_s: float
    mean_running: float
    mean_queued: float
    engine_bound_s: float
    tool_bound_s: float
    shares: dict[str, Shares]


def predict(rollouts: Sequence[Sequence[Plan]], setup: Setup) -> Prediction:
    """Simulate the rollouts, one per step.

    Raises:
        ScenarioError: there is no rollout, or one has no trajectory.
    """
    if not rollouts or not all(rollouts):
        raise ScenarioError("`rollouts` must hold one rollout with one trajectory at least.")
    runs = [_rollout(plans, setup) for plans in rollouts]
    rollout_s = _mean([_seconds(engines) for engines in runs])
    step_s = rollout_s + setup.learner_s + setup.sync_s
    engines = [engine for rollout in runs for engine in rollout]
    busy_s = sum(engine.busy_s for engine in engines)
    sequence_s = sum(engine.sequence_s for engine in engines)
    return Prediction(
        num_engines=setup.num_engines,
        rollout_s=rollout_s,
        learner_s=setup.learner_s,
        sync_s=setup.sync_s,
        step_s=step_s,
        tokens_per_s=_ratio(sum(e.num_tokens for e in engines) / len(runs), step_s),
        mean_running=_ratio(sequence_s, busy_s),
        mean_queued=_ratio(sum(e.queued_s for e in engines) / len(engines), rollout_s),
        engine_bound_s=_mean(
            [_seconds(_rollout(with_tools(plans, lambda _: 0.0), setup)) for plans in rollouts]
        ),
        tool_bound_s=_mean([_seconds([run_engine(p, _FREE, len(p))]) for p in rollouts]),
        shares=_shares(setup, busy_s / len(engines), step_s),
    )


def _rollout(plans: Sequence[Plan], setup: Setup) -> list[EngineRun]:
    return [
        run_engine(plans[first :: setup.num_engines], setup.rate, setup.max_num_seqs)
        for first in range(setup.num_engines)
    ]


def _seconds(engines: Sequence[EngineRun]) -> float:
    return max(engine.seconds for engine in engines)


def _shares(setup: Setup, busy_s: float, step_s: float) -> dict[str, Shares]:
    if setup.layout == "shared":
        return {"device": _share(step_s, busy_s, setup.learner_s, setup.sync_s)}
    return {
        "engine": _share(step_s, busy_s, 0.0, setup.sync_s),
        "learner": _share(step_s, 0.0, setup.learner_s, setup.sync_s),
    }


def _share(step_s: float, sampling_s: float, training_s: float, sync_s: float) -> Shares:
    sampling, training, sync = (_ratio(s, step_s) for s in (sampling_s, training_s, sync_s))
    return Shares(
        sampling=sampling, training=training, sync=sync, idle=1 - sampling - training - sync
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
