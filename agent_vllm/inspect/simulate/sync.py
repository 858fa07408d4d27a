"""Compute how long a weight sync takes over a link.

Invariant: each time is a lower bound, bytes divided by the link's rate. Packing, loading and cache
resets come on top.
"""

import math

from agent_vllm.errors import ScenarioError
from agent_vllm.inspect.simulate.hardware import (
    BYTES_PER_PARAMETER,
    DECODERS,
    LINK_EFFICIENCY,
    LINKS,
)

ADAPTER_RANK = 16


def sync_seconds(num_bytes: float, link: str) -> float:
    """Return the seconds to send `num_bytes` over a link of `LINKS`, at `LINK_EFFICIENCY`.

    Raises:
        ScenarioError: unknown link, or a number of bytes that is negative or not finite.
    """
    if link not in LINKS:
        raise ScenarioError(f"`link` must be one of {tuple(LINKS)}, got {link!r}.")
    if not 0 <= num_bytes < math.inf:
        raise ScenarioError(f"`sync_bytes` must be 0 or more, got {num_bytes}.")
    return num_bytes / (LINKS[link] * LINK_EFFICIENCY)


def sync_table() -> list[list[str]]:
    """Return the expected sync times as rows of text; the first row is the header."""
    rows = [["model", "sent", "bytes", *LINKS]]
    for name, decoder in DECODERS.items():
        for sent, number in (
            ("all", decoder.num_parameters()),
            (f"LoRA r={ADAPTER_RANK}", decoder.num_adapter_parameters(ADAPTER_RANK)),
        ):
            num_bytes = BYTES_PER_PARAMETER * number
            seconds = [_duration(sync_seconds(num_bytes, link)) for link in LINKS]
            rows.append([name, sent, _size(num_bytes), *seconds])
    return rows


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * factor
        if value >= 1 or unit == "us":
            break
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
