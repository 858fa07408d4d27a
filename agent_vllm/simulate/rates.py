"""How fast an engine is, by how many sequences run in it at a time; measured, or fitted to spans.

Invariant: nothing faster than what was measured is ever assumed.
"""

import itertools
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent_vllm.errors import ScenarioError

_NUM_ROUNDS = 40  # of the fit; it has settled by then
_LEAST_TIME = 0.01  # share of the time; what was seen for less is not believed

SecondsByBin = dict[int, float]  # by how many sequences ran


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Tokens per second of one engine.

    Args:
        points: `(num_sequences, tokens_per_s)`, the tokens of all those sequences together, in
            any order. Between points the time of a step (one token for each sequence) is
            interpolated; below the first it is the first's, above the last the rate is the last's.
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
        """Seconds in which each of so many sequences gets one token."""
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
    """A turn as it was seen; seconds since its rollout began, waiting in the queue included."""

    start_s: float
    end_s: float
    num_tokens: int


def fit_rates(rollouts: Iterable[Sequence[TimedTurn]]) -> RateCurve:
    """The curve under which each turn makes its tokens in its span.

    A turn that ran beside 64 others at first and alone in the end had a slow and a fast part. How
    its tokens fall on them is found by turns: tokens by the rates, rates by the tokens
    (Richardson-Lucy). Numbers of sequences are put together by half powers of two.

    Args:
        rollouts: of each rollout all its turns, all of one engine.

    Raises:
        ScenarioError: no turn took any time.
    """
    turns: list[tuple[int, SecondsByBin]] = []  # with the tokens of each
    wall_s: SecondsByBin = defaultdict(float)
    sequence_s: SecondsByBin = defaultdict(float)  # two sequences for a second are two seconds
    for rollout in rollouts:
        turns += _by_bin(rollout, wall_s, sequence_s)
    believed = {bin_ for bin_, s in wall_s.items() if s >= _LEAST_TIME * sum(wall_s.values())}
    if not believed:
        raise ScenarioError("No turn has a span; give `rate`.")
    rates = _rates_of_a_sequence(turns)
    points = []
    for bin_ in sorted(believed):
        number = sequence_s[bin_] / wall_s[bin_]
        points.append((number, number * rates[bin_]))
    return RateCurve(tuple(points))


def _by_bin(
    rollout: Sequence[TimedTurn], wall_s: SecondsByBin, sequence_s: SecondsByBin
) -> list[tuple[int, SecondsByBin]]:
    """Each turn's seconds by how many ran beside it; both counters are brought up to date."""
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


def _rates_of_a_sequence(turns: Sequence[tuple[int, SecondsByBin]]) -> SecondsByBin:
    """Tokens per second of one sequence, by bin."""
    total_s: SecondsByBin = defaultdict(float)
    for _, seconds in turns:
        for bin_, s in seconds.items():
            total_s[bin_] += s
    rates = dict.fromkeys(total_s, 1.0)
    for _ in range(_NUM_ROUNDS):
        tokens = dict.fromkeys(rates, 0.0)
        for num_tokens, seconds in turns:
            expected = sum(rates[bin_] * s for bin_, s in seconds.items())
            for bin_, s in seconds.items():
                tokens[bin_] += num_tokens * rates[bin_] * s / expected
        rates = {bin_: tokens[bin_] / total_s[bin_] for bin_ in rates}
    return rates
