"""Hold the progress of a rollout. The rollout writes it; whoever shows progress reads it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class RolloutStatus:
    """Hold the progress of a rollout, kept up to date while it runs."""

    num_trajectories: int = 0
    num_finished: int = 0
    num_in_tools: int = 0
    num_sampled_tokens: int = 0
    num_turns: int = 0  # of all trajectories together
    max_turn: int = 0  # turns of the trajectory that has most
    num_retries: int = 0  # requests that the engine failed and that were retried
    running_calls: dict[object, tuple[str, float]] = field(default_factory=dict)  # name, start
    started_s: float = field(default_factory=time.monotonic)

    @property
    def num_generating(self) -> int:
        return self.num_trajectories - self.num_finished - self.num_in_tools

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def remaining_s(self) -> float | None:
        """Return the seconds to go at the pace so far; None before a trajectory has finished."""
        if self.num_finished == 0:
            return None
        num_left = self.num_trajectories - self.num_finished
        return self.elapsed_s * num_left / self.num_finished

    @property
    def slowest_call(self) -> tuple[str, float] | None:
        """Return the name and the seconds of the running tool call that started first."""
        for name, start_s in list(self.running_calls.values()):  # in order of their start
            return name, time.monotonic() - start_s
        return None

    def count_turn(self, number: int, num_tokens: int) -> None:
        """Count a trajectory's turn `number`, from 1, of `num_tokens` sampled tokens."""
        self.num_turns += 1
        self.max_turn = max(self.max_turn, number)
        self.num_sampled_tokens += num_tokens

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Show a tool call as running while the block runs."""
        call = object()
        self.running_calls[call] = (name, time.monotonic())
        try:
            yield
        finally:
            del self.running_calls[call]
