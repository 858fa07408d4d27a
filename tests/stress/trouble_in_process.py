"""Make things go wrong in a process of its own. Apart, as every worker imports this module."""

import os
import sys
import time

KINDS = ("isolated, exits", "isolated, sleeps", "isolated, sys.exit", "isolated, forks")


def in_process(kind: str, text: str) -> str:
    """
    Misbehaves in a process of its own.

    Args:
        kind: how
        text: what is returned
    """
    if kind == "isolated, exits":
        os._exit(7)
    if kind == "isolated, sleeps":
        time.sleep(600)
    if kind == "isolated, sys.exit":
        sys.exit("bye")
    if os.fork() == 0:  # "isolated, forks"
        time.sleep(600)
    return text
