"""Read a recorded run for a simulation: its trajectories, engine rate and learner time.

Invariant: the time after a turn is the recorded one, whatever it was spent on (tools, users, host).
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_vllm.errors import RecordError
from agent_vllm.inspect.simulate.rates import RateCurve, TimedTurn, fit_rates
from agent_vllm.inspect.simulate.workload import Plan, Turn
from agent_vllm.record import RolloutRecord, read_batches, to_trajectory
from agent_vllm.types import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """Hold the training rollouts of a record.

    Attributes:
        rollouts: trajectories to simulate, per rollout.
        rollout_s: measured seconds, per rollout.
        timed_turns: recorded turns, per rollout.
        between_s: seconds from each rollout's end to the next one's start: rewards, learner and
            sync. None where no training rollout followed in the same session.
    """

    rollouts: list[list[Plan]]
    rollout_s: list[float]
    timed_turns: list[list[TimedTurn]]
    between_s: list[float | None]

    def rate(self) -> RateCurve:
        """Fit the rate of the engines that sampled this process's rollouts, taken as one engine."""
        return fit_rates(self.timed_turns)

    def learner_s(self) -> float | None:
        """Return the median time of rewards, learner and sync; a checkpoint does not shift it."""
        known = [seconds for seconds in self.between_s if seconds is not None]
        return statistics.median(known) if known else None


def read_run(path: str | Path) -> RecordedRun:
    """Read one process's record; evaluation rollouts are skipped.

    Raises:
        FileNotFoundError, RecordError: as `read_rollouts`, or no training rollout is in it.
    """
    batches = [_Batch.of(batch) for batch in read_batches(path)]
    trained = [batch for batch in batches if batch.mode != "eval"]
    if not trained:
        raise RecordError(f"{path} holds evaluations only. Record a training run.")
    return RecordedRun(
        rollouts=[batch.plans for batch in trained],
        rollout_s=[batch.seconds for batch in trained],
        timed_turns=[batch.turns for batch in trained],
        between_s=[
            _between_s(before, after)
            for before, after in itertools.pairwise([*batches, None])
            if before is not None and before.mode != "eval"
        ],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Hold what a simulation needs of a rollout; the tokens are dropped."""

    mode: str
    session: int
    started: float | None
    seconds: float
    plans: list[Plan]
    turns: list[TimedTurn]

    @classmethod
    def of(cls, records: Sequence[RolloutRecord]) -> "_Batch":
        first = records[0]
        trajectories = [to_trajectory(record) for record in records]
        return cls(
            mode=first["mode"],
            session=first["session"],
            started=first["started"],
            seconds=max((span.end_s for t in trajectories for span in t.spans), default=0.0),
            plans=[plan_of(trajectory) for trajectory in trajectories],
            turns=timed_turns(trajectories),
        )


def _between_s(before: _Batch, after: _Batch | None) -> float | None:
    if after is None or (after.mode, after.session) != (before.mode, before.session):
        return None
    if before.started is None or after.started is None:
        return None
    return max(after.started - before.started - before.seconds, 0.0)


def timed_turns(trajectories: Iterable[Trajectory]) -> list[TimedTurn]:
    """Return the timed turns of one rollout.

    Raises:
        RecordError: the numbers of model spans and of turns differ.
    """
    return [turn for trajectory in trajectories for turn in _timed_turns(trajectory)]


def plan_of(trajectory: Trajectory) -> Plan:
    """Return the trajectory as turns, each with the seconds until the next one began.

    Raises:
        RecordError: as `timed_turns`.
    """
    turns = _timed_turns(trajectory)
    last_s = max((span.end_s for span in trajectory.spans), default=0.0)
    starts_s = [*(turn.start_s for turn in turns[1:]), last_s]
    return [
        Turn(turn.num_tokens, max(start_s - turn.end_s, 0.0))
        for turn, start_s in zip(turns, starts_s, strict=False)  # none begins after no turn
    ]


def _timed_turns(trajectory: Trajectory) -> list[TimedTurn]:
    spans = [span for span in trajectory.spans if span.kind == "model"]
    sampled = [segment for segment in trajectory.segments if segment.is_sampled]
    if len(spans) != len(sampled):
        raise RecordError(
            f"A trajectory has {len(sampled)} turns and {len(spans)} spans of the model; there "
            "must be one for each turn. Was it recorded by a rollout?"
        )
    return [
        TimedTurn(span.start_s, span.end_s, len(segment.token_ids))
        for span, segment in zip(spans, sampled, strict=True)
    ]
