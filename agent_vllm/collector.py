"""Full garbage collections are rare while a rollout runs.

One looks at all that lives while it holds Python's lock, so the engine's thread stands still too:
0.15 s at 4,096 trajectories, a dozen times a rollout. Invariant: young garbage is collected as
ever, and after the last rollout the thresholds are what they were.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FACTOR = 10

_lock = threading.Lock()
_num_running = 0
_thresholds = gc.get_threshold()  # before the first of those that run


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """While any such block runs, on any thread, full collections are ten times as rare."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _num_running, _thresholds
    with _lock:
        if not _num_running:
            _thresholds = gc.get_threshold()
        _num_running += change
        young, middle, full = _thresholds
        gc.set_threshold(young, middle, full * _FACTOR if _num_running else full)
