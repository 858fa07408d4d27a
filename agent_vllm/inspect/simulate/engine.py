"""Simulate one engine and its trajectories, event by event.

All running sequences get tokens at the same rate, which depends on their number. The others wait
in a first-come, first-served queue. Invariant: busy and idle time add up to the whole.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from agent_vllm.inspect.simulate.rates import RateCurve
from agent_vllm.inspect.simulate.workload import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRun:
    """Hold what one engine did in a rollout.

    Attributes:
        seconds: time until the last trajectory finished.
        busy_s: part of it with at least one running sequence.
        sequence_s: running time, summed over sequences; divided by `busy_s`, their mean number.
        queued_s: queueing time, summed over sequences.
        num_tokens: sampled tokens.
    """

    seconds: float
    busy_s: float
    sequence_s: float
    queued_s: float
    num_tokens: int


class _EngineState:
    """Track the running and the queued sequences between two events."""

    def __init__(self, rate: RateCurve, max_num_seqs: int) -> None:
        self._rate = rate
        self._max_num_seqs = max_num_seqs
        # All running sequences have the same pace, so tokens since the start are a common clock.
        self._clock = 0.0
        self._running: list[tuple[float, int]] = []  # clock at the end, trajectory
        self._queue: deque[tuple[int, int]] = deque()  # trajectory, tokens
        self.busy_s = self.sequence_s = self.queued_s = 0.0

    def next_end_s(self) -> float:
        """Return the seconds until the next sequence finishes."""
        if not self._running:
            return math.inf
        return (self._running[0][0] - self._clock) * self._rate.step_s(len(self._running))

    def pass_time(self, seconds: float) -> None:
        self.queued_s += seconds * len(self._queue)
        if self._running and seconds > 0:
            self.busy_s += seconds
            self.sequence_s += seconds * len(self._running)
            self._clock += seconds / self._rate.step_s(len(self._running))

    def add(self, trajectory: int, num_tokens: int) -> None:
        self._queue.append((trajectory, num_tokens))
        self._admit()

    def take_done(self) -> int:
        self._clock, trajectory = heapq.heappop(self._running)
        self._admit()
        return trajectory

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._max_num_seqs:
            trajectory, num_tokens = self._queue.popleft()
            heapq.heappush(self._running, (self._clock + num_tokens, trajectory))


def run_engine(plans: Sequence[Plan], rate: RateCurve, max_num_seqs: int) -> EngineRun:
    """Simulate all trajectories on one engine; they start together."""
    engine = _EngineState(rate, max_num_seqs)
    now_s = 0.0
    with_tools = [
        (0.0, trajectory) for trajectory in range(len(plans))
    ]  # (time of return, trajectory)
    remaining = [iter(plan) for plan in plans]
    tool_s = [0.0] * len(plans)
    while True:
        back_s = with_tools[0][0] if with_tools else math.inf
        end_s = now_s + engine.next_end_s()
        event_s = min(back_s, end_s)
        if event_s == math.inf:
            break
        engine.pass_time(event_s - now_s)
        now_s = event_s
        if back_s <= end_s:
            _, trajectory = heapq.heappop(with_tools)
            turn = next(remaining[trajectory], None)
            if turn is not None:
                tool_s[trajectory] = turn.tool_s
                engine.add(trajectory, turn.num_tokens)
        else:
            trajectory = engine.take_done()
            heapq.heappush(with_tools, (now_s + tool_s[trajectory], trajectory))
    return EngineRun(
        seconds=now_s,
        busy_s=engine.busy_s,
        sequence_s=engine.sequence_s,
        queued_s=engine.queued_s,
        num_tokens=sum(turn.num_tokens for plan in plans for turn in plan),
    )
