"""How far a rollout is, for whoever shows progress. The rollout writes it, others read it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class RolloutStatus:
    """How far a rollout is, kept up to date while it runs; for whoever shows progress."""

    num_trajectories: int = 0
    num_finished: int = 0
    num_in_tools: int = 0
    num_sampled_tokens: int = 0
    num_turns: int = 0  # of all trajectories together
    max_turn: int = 0  # of the trajectory that is furthest
    num_retries: int = 0  # requests that the engine failed and was asked for once more
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
        """Seconds to go if the others finish at the pace so far; None before the first has."""
        if self.num_finished == 0:
            return None
        num_left = self.num_trajectories - self.num_finished
        return self.elapsed_s * num_left / self.num_finished

    @property
    def slowest_call(self) -> tuple[str, float] | None:
        """The tool call that has run longest of those running now: its name and seconds."""
        for name, start_s in list(self.running_calls.values()):  # in order of their start
            return name, time.monotonic() - start_s
        return None

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """A tool call runs for as long as the block does."""
        call = object()
        self.running_calls[call] = (name, time.monotonic())
        try:
            yield
        finally:
            del self.running_calls[call]
