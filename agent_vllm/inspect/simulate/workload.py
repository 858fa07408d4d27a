"""Describe the trajectories of a rollout as turns sampled from distributions.

Invariant: a sampled turn has at least one token and no negative time.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_vllm.errors import ScenarioError

_Z_95 = 1.6449  # standard deviations from the median to the 95th percentile
FORMS = "NUMBER, uniform:LOW:HIGH, lognormal:MEDIAN:P95 or list:A,B,..."


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold a turn's length and the delay after it.

    Attributes:
        num_tokens: tokens sampled by the engine.
        tool_s: seconds from the turn's end until the trajectory's next request, or its end.
    """

    num_tokens: int
    tool_s: float


Plan = Sequence[Turn]  # one trajectory


class Distribution(Protocol):
    def draw(self, stream: random.Random) -> float:
        """Sample a value of 0 or more."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Sample uniformly from `low` to `high`; equal ends give a fixed value."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise ScenarioError(
                f"uniform:LOW:HIGH must have 0 <= LOW <= HIGH, got {self.low:g} and {self.high:g}."
            )

    def draw(self, stream: random.Random) -> float:
        return stream.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Sample log-normally, by the median and the 95th percentile."""

    median: float
    p95: float

    def __post_init__(self) -> None:
        if not 0 < self.median <= self.p95 < math.inf:
            raise ScenarioError(
                "lognormal:MEDIAN:P95 must have 0 < MEDIAN <= P95, got "
                f"{self.median:g} and {self.p95:g}."
            )

    def draw(self, stream: random.Random) -> float:
        return self.median * math.exp(
            stream.gauss(0.0, 1.0) * math.log(self.p95 / self.median) / _Z_95
        )


@dataclass(frozen=True, slots=True)
class Empirical:
    """Sample one of the given values."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values or not all(0 <= value < math.inf for value in self.values):
            raise ScenarioError(f"list: must hold numbers of 0 or more, got {list(self.values)}.")

    def draw(self, stream: random.Random) -> float:
        return stream.choice(self.values)


def distribution(text: str | float) -> Distribution:
    """Parse a distribution; see `FORMS`.

    >>> distribution("uniform:0:1")
    Uniform(low=0.0, high=1.0)

    Raises:
        ScenarioError: unknown form or invalid numbers.
    """
    kind, _, rest = str(text).partition(":")
    try:
        if kind == "uniform":
            low, high = map(float, rest.split(":"))
            return Uniform(low, high)
        if kind == "lognormal":
            median, p95 = map(float, rest.split(":"))
            return LogNormal(median, p95)
        if kind == "list":
            return Empirical(tuple(map(float, rest.split(","))))
        value = float(text)
    except ScenarioError:
        raise
    except ValueError:
        raise ScenarioError(f"A distribution must be {FORMS}, got {text!r}.") from None
    if not 0 <= value < math.inf:
        raise ScenarioError(f"A fixed value must be a number of 0 or more, got {text!r}.")
    return Uniform(value, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Sample trajectories independently. The last turn is an answer: no tool follows it."""

    turns: Distribution
    tokens: Distribution
    tool_s: Distribution

    def draw(self, num_trajectories: int, stream: random.Random) -> list[Plan]:
        return [self._trajectory(stream) for _ in range(num_trajectories)]

    def _trajectory(self, stream: random.Random) -> Plan:
        num_turns = _count(self.turns, stream)
        tools = [self.tool_s.draw(stream) for _ in range(num_turns - 1)]
        return [Turn(_count(self.tokens, stream), tool_s) for tool_s in [*tools, 0.0]]


def _count(values: Distribution, stream: random.Random) -> int:
    return max(round(values.draw(stream)), 1)


def with_tools(plans: Sequence[Plan], tool_s: Callable[[float], float]) -> list[Plan]:
    """Return the same trajectories with other delays after the turns that a tool followed."""
    return [
        [Turn(turn.num_tokens, tool_s(turn.tool_s) if turn.tool_s else 0.0) for turn in plan]
        for plan in plans
    ]
