"""Arithmetic of time spans, each a pair of start and end in seconds.

Invariant: merged spans are in order and do not touch, so their lengths can be added up.
"""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that at least one of them covers.

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
    """Seconds in which at least one of them ran."""
    return sum(end - start for start, end in merged(intervals))


def overlap_s(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Seconds in which one of the first and one of the second ran: what both lists cover."""
    return covered_s(first) + covered_s(second) - covered_s([*first, *second])
