"""Make full garbage collections rare while a rollout runs.

A full collection visits every live object while it holds Python's lock, so the engine's thread
waits too: 0.15 s at 4,096 trajectories, a dozen times per rollout. Invariant: young garbage is
collected as usual, and after the last rollout the thresholds are restored.
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
    """Make full collections ten times as rare while any such block runs, on any thread."""
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
