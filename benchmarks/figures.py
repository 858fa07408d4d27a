"""Define a benchmark's figures and goals, and take measurements in turns.

Invariant: a ratio compares two measurements of the same round, never of two runs.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Seconds = dict[str, list[float]]  # per side, one per round


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Require a value to be at most, or at least, `limit`; `"none"` only shows it."""

    kind: Literal["at most", "at least", "none"]
    limit: float = 0.0

    def holds(self, value: float) -> bool | None:
        if self.kind == "none":
            return None
        return value <= self.limit if self.kind == "at most" else value >= self.limit

    def __str__(self) -> str:
        signs = {"at most": "<=", "at least": ">="}
        return f"{signs[self.kind]} {self.limit:g}" if self.kind in signs else ""


def at_most(limit: float) -> Goal:
    return Goal(kind="at most", limit=limit)


def at_least(limit: float) -> Goal:
    return Goal(kind="at least", limit=limit)


SHOWN = Goal(kind="none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Hold one line of the table.

    Attributes:
        id: the row's id, with a suffix where it has several figures: "B7 tiny".
        values: one per round; the figure is their median, the spread their extremes.
        note: what else was seen, such as both sides' seconds.
    """

    id: str
    what: str
    goal: Goal
    values: Sequence[float]
    unit: str = ""
    note: str = ""

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "goal": str(self.goal),
            "limit": None if self.goal.kind == "none" else self.goal.limit,
            "holds": self.goal.holds(self.value),
            "spread": [min(self.values), max(self.values)],
            "note": self.note,
        }


def seconds_of(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def cpu_seconds_of(work: Callable[[], object]) -> float:
    """Return the CPU seconds of all threads of this process; other load adds little."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def in_turns(
    sides: Mapping[str, Callable[[], object]],
    num_rounds: int,
    clock: Callable[[Callable[[], object]], float] = seconds_of,
) -> Seconds:
    """Return the seconds of each side, measured A B A B."""
    seconds: Seconds = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, work in sides.items():
            seconds[name].append(clock(work))
    return seconds


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Divide round by round."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def medians(seconds: Mapping[str, Sequence[float]]) -> str:
    """Format both sides for a note: "ours 2.1 s, barrier 3.4 s"."""
    return ", ".join(f"{name} {statistics.median(s):.3g} s" for name, s in seconds.items())
