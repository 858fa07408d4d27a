"""Delay signals that ask a run to stop while something must be finished.

Invariant: a delayed signal is delivered as soon as the work is done.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interrupted_afterwards() -> Iterator[None]:
    """
    Delay Ctrl-C and SIGTERM until the block has ended. Only the main thread gets signals: on others, do nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers: dict[int, Any] = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in _STOPPING
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in received[:1]:
        signal.raise_signal(number)
