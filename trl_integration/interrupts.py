"""Signals that ask a run to stop, put off while something must become whole.

Invariant: a signal is delivered, once what was begun is done.
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
    Puts Ctrl-C and SIGTERM off until the block is done. Elsewhere than on the main thread, where signals don't arrive,
    does nothing.
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
