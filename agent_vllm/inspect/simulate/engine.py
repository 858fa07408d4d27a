"""One engine and its trajectories, played out event by event.

All sequences in the engine get their tokens at one pace, which depends on how many there are;
others queue, first come, first served. Invariant: busy and idle time add up to the whole.
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
    """What one engine did in a rollout.

    Attributes:
        seconds: until the last trajectory was done.
        busy_s: of them, with a sequence in the engine.
        sequence_s: seconds of all sequences in the engine together; by `busy_s` their mean number.
        queued_s: seconds of all sequences in the queue together.
        num_tokens: sampled.
    """

    seconds: float
    busy_s: float
    sequence_s: float
    queued_s: float
    num_tokens: int


class _EngineState:
    """The engine between two events: who runs, who queues."""

    def __init__(self, rate: RateCurve, max_num_seqs: int) -> None:
        self._rate = rate
        self._max_num_seqs = max_num_seqs
        # Everyone in the engine has the same pace: tokens since the start are one clock for all.
        self._clock = 0.0
        self._running: list[tuple[float, int]] = []  # clock at the end, trajectory
        self._queue: deque[tuple[int, int]] = deque()  # trajectory, tokens
        self.busy_s = self.sequence_s = self.queued_s = 0.0

    def next_end_s(self) -> float:
        """Seconds until a sequence is done."""
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
    """Play all trajectories out on one engine; they start together."""
    engine = _EngineState(rate, max_num_seqs)
    now_s = 0.0
    with_tools = [(0.0, trajectory) for trajectory in range(len(plans))]  # when it is back
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
