"""Add up times that overlap; each is a pair of start and end in seconds.

Invariant: merged intervals are in order and do not touch, so their lengths can be added.
"""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the time that at least one of them covers, as intervals in order.

    >>> merged([(2.0, 3.0), (0.0, 1.0), (0.5, 1.5)])
    [(0.0, 1.5), (2.0, 3.0)]
    """
    whole: list[Interval] = []
    for start, end in sorted(intervals):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(whole[-1][1], end))
        else:
            whole.append((start, end))
    return whole


def covered_s(intervals: Iterable[Interval]) -> float:
    """Return the seconds that at least one of them covers."""
    return sum(end - start for start, end in merged(intervals))


def overlap_s(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the seconds that both lists cover."""
    return covered_s(first) + covered_s(second) - covered_s([*first, *second])
