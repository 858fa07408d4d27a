"""Describe an engine's speed by the number of running sequences, measured or fitted to spans.

Invariant: no rate above the measured ones is assumed.
"""

import itertools
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from agent_vllm.errors import ScenarioError

SecondsByBin = dict[int, float]  # seconds by number of running sequences, binned


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Map a number of running sequences to one engine's tokens per second.

    Args:
        points: `(num_sequences, tokens_per_s)` in any order; the rate is the total over the
            sequences. Between points the step time (one token per sequence) is interpolated. Below
            the first point the step time is constant; above the last one the rate is.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        numbers = [number for number, _ in self.points]
        if not self.points or len(set(numbers)) < len(numbers):
            raise ScenarioError(
                f"`rate` must have points of different numbers of sequences, got {numbers}."
            )
        for number, rate in self.points:
            if not (0 < number < math.inf and rate > 0):
                raise ScenarioError(
                    f"`rate` must be SEQUENCES:TOKENS_PER_S, both above 0, got {number:g}:{rate:g}."
                )
        object.__setattr__(self, "points", tuple(sorted(self.points)))

    def step_s(self, num_sequences: int) -> float:
        """Return the step time: seconds for one token of each of `num_sequences`."""
        numbers = [number for number, _ in self.points]
        above = bisect_left(numbers, num_sequences)
        if above == 0:
            return numbers[0] / self.points[0][1]
        if above == len(numbers):
            return num_sequences / self.points[-1][1]
        (low, low_rate), (high, high_rate) = self.points[above - 1 : above + 1]
        part = (num_sequences - low) / (high - low)
        return (1 - part) * low / low_rate + part * high / high_rate


# ---- from spans ----


@dataclass(frozen=True, slots=True)
class TimedTurn:
    """Hold a recorded turn. Seconds since the start of the rollout; queueing is included."""

    start_s: float
    end_s: float
    num_tokens: int


def fit_rates(rollouts: Iterable[Sequence[TimedTurn]]) -> RateCurve:
    """Fit the curve that best explains how many tokens each turn made in its span.

    The step time is modelled as a fixed part plus a part per sequence. Two parameters are robust
    where there is little data, such as the last few sequences of a rollout. They are fitted by
    least squares over the tokens of all turns, with the total number of tokens kept.

    Args:
        rollouts: all turns of each rollout, all sampled by one engine.

    Raises:
        ScenarioError: no turn took any time.
    """
    turns: list[tuple[int, SecondsByBin]] = []  # (num_tokens, seconds by bin) per turn
    wall_s: SecondsByBin = defaultdict(float)
    sequence_s: SecondsByBin = defaultdict(float)  # summed over sequences
    for rollout in rollouts:
        turns += _by_bin(rollout, wall_s, sequence_s)
    if not turns:
        raise ScenarioError("No turn has a span; give `rate`.")
    numbers = {bin_: sequence_s[bin_] / wall_s[bin_] for bin_ in sorted(wall_s)}
    fixed_s, per_sequence_s = _step_parts(turns, numbers)
    ends = sorted({1.0, max(numbers.values())})
    return RateCurve(tuple((n, n / (fixed_s + n * per_sequence_s)) for n in ends))


def _step_parts(
    turns: Sequence[tuple[int, SecondsByBin]], numbers: Mapping[int, float]
) -> tuple[float, float]:
    """Return the fixed seconds of a step and its seconds per sequence."""
    slopes = torch.logspace(-5, 3, 161, dtype=torch.float64)  # [S], per sequence by fixed
    tokens = torch.tensor([[n] for n, _ in turns], dtype=torch.float64)  # [N, 1]
    seconds = torch.tensor(
        [[by_bin.get(bin_, 0.0) for bin_ in numbers] for _, by_bin in turns], dtype=torch.float64
    )  # [N, bins]
    steps_s = 1 + torch.tensor(list(numbers.values()), dtype=torch.float64)[:, None] * slopes
    expected = seconds @ (1 / steps_s)  # [N, S], with a fixed part of 1 s
    fixed_s = expected.sum(0) / tokens.sum()
    best = (tokens - expected / fixed_s).square().sum(0).argmin()
    return float(fixed_s[best]), float(fixed_s[best] * slopes[best])


def _by_bin(
    rollout: Sequence[TimedTurn], wall_s: SecondsByBin, sequence_s: SecondsByBin
) -> list[tuple[int, SecondsByBin]]:
    """Return each turn's tokens and its seconds by number of running sequences.

    Bins are half powers of two. The rollout's time per bin is added to the last two arguments.
    """
    changes = Counter(turn.start_s for turn in rollout)
    changes.subtract(turn.end_s for turn in rollout)
    times = sorted(changes)
    so_far: SecondsByBin = defaultdict(float)
    seconds_at = {time_s: {} for time_s in times[:1]}
    number = 0
    for start_s, end_s in itertools.pairwise(times):
        number += changes[start_s]
        if number:
            bin_ = round(2 * math.log2(number))
            so_far[bin_] += end_s - start_s
            wall_s[bin_] += end_s - start_s
            sequence_s[bin_] += number * (end_s - start_s)
        seconds_at[end_s] = dict(so_far)
    return [
        (turn.num_tokens, _since(seconds_at[turn.start_s], seconds_at[turn.end_s]))
        for turn in rollout
        if turn.end_s > turn.start_s and turn.num_tokens
    ]


def _since(before: SecondsByBin, after: SecondsByBin) -> SecondsByBin:
    seconds = {bin_: s - before.get(bin_, 0.0) for bin_, s in after.items()}
    return {bin_: s for bin_, s in seconds.items() if s > 0}
