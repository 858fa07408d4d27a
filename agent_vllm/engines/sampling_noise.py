"""Draw the noise that tokens are sampled with: one stream per request, started by its seed.

A token is the argmax of p / e with one e ~ Exp(1) per token of the vocabulary, which is a draw from
p. Invariant: a request's noise depends only on its seed and on how many tokens it has drawn. All
engines on a CPU draw the same.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

NoiseStream = np.random.Generator | torch.Generator


def noise_stream(seed: int, device: torch.device) -> NoiseStream:
    """Start a request's stream. On a CPU numpy draws it, in a third of torch's time."""
    if device.type == "cpu":
        return np.random.default_rng(seed % 2**64)
    return torch.Generator(device).manual_seed(seed)


def draw_noise(
    streams: Sequence[NoiseStream | None], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Return each stream's next draws, `[B, V]` float32; ones, which are no noise, for None."""
    shape = (len(streams), vocab_size)
    if device.type != "cpu":
        noise = torch.ones(shape, device=device)
        for row, stream in zip(noise, streams, strict=True):
            if stream is not None:
                row.exponential_(generator=cast(torch.Generator, stream))
        return noise
    # Not in float32: one draw in 2**23 is exactly 0 there, and wins for the most unlikely token.
    drawn = np.empty(shape)
    for row, stream in zip(drawn, streams, strict=True):
        if stream is None:
            row.fill(1.0)
        else:
            cast(np.random.Generator, stream).standard_exponential(out=row)
    return torch.from_numpy(drawn).float()
