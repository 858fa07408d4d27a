"""The noise that tokens are drawn with: one stream a request, begun by its seed.

A token is the argmax of p / e with one e ~ Exp(1) for each token of the vocabulary, which is a draw
from p. Invariant: a request's noise depends on its seed and on how many tokens it has drawn, not on
what else is in the batch; every engine on a CPU draws the same.
"""

import numpy as np
import torch

NoiseStream = np.random.Generator | torch.Generator


def noise_stream(seed: int, device: torch.device) -> NoiseStream:
    """On a CPU numpy draws: it takes a third of torch's time."""
    if device.type == "cpu":
        return np.random.default_rng(seed % 2**64)
    return torch.Generator(device).manual_seed(seed)


def fill_with_noise(row: torch.Tensor, stream: NoiseStream) -> None:
    """The stream's next draws, into `row` `[V]`."""
    if isinstance(stream, torch.Generator):
        row.exponential_(generator=stream)
        return
    # Not in float32: one draw in 2**23 is exactly 0 there, and wins for the most unlikely token.
    row.copy_(torch.from_numpy(stream.standard_exponential(row.shape[0])))
