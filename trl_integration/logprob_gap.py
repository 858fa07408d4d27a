"""The gap between the engine's logprobs and the learner's, and how far it may go.

Invariant: once the gap of a rollout is beyond the bound, no further token of that rollout is trained.

Legend: B rows, C completion tokens.
"""

from dataclasses import dataclass

import torch
from accelerate import Accelerator

from agent_vllm.training import logprob_gap
from trl_integration.processes import gather

_MAX_MEAN_FLOAT32 = 0.01  # nats; kernels differ by less than 1e-4
_MAX_MEAN_HALF = 0.2  # a bfloat16 engine is 0.02 to 0.04 away from a bfloat16 learner
_WORST_TOKEN = 25.0  # a single token may be this many times as far away as the mean


def max_mean_gap(*dtypes: torch.dtype | None) -> float:
    """
    Return the mean gap in nats that rounding explains.

    Args:
        dtypes: that the engine and the learner compute in; None where it is not known.
    """
    is_exact = all(dtype in (torch.float32, torch.float64) for dtype in dtypes)
    return _MAX_MEAN_FLOAT32 if is_exact else _MAX_MEAN_HALF


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """The absolute difference of the logprobs in nats, over the tokens of all processes."""

    mean: float
    kl: float
    max: float
    num_tokens: int

    @property
    def metrics(self) -> dict[str, float]:
        figures = {"mean": self.mean, "kl": self.kl, "max": self.max}
        return {f"sampling/logprob_gap/{name}": value for name, value in figures.items()}


class GapMeter:
    """
    Compare the engine's logprobs with the learner's while both hold the same weights.

    Args:
        max_mean: the largest mean gap in nats with which a rollout is trained. A single token may be 25 times as far.
    """

    def __init__(self, max_mean: float) -> None:
        self.max_mean = max_mean
        self.max_worst = _WORST_TOKEN * max_mean
        self._sampled_with: dict[str, int] = {}
        self._is_exceeded: dict[str, bool] = {}
        self._num_accepted: dict[str, int] = {}

    def expect(self, mode: str, policy_version: int) -> None:
        """Note the version that sampled the latest rollout of this mode."""
        self._sampled_with[mode] = policy_version
        self._is_exceeded[mode], self._num_accepted[mode] = False, 0

    def lag(self, mode: str, policy_version: int) -> int:
        """Return how many versions the learner has moved on since that rollout."""
        return policy_version - self._sampled_with[mode]

    def is_exceeded(self, mode: str) -> bool:
        """Return whether the latest rollout of this mode was beyond the bound."""
        return self._is_exceeded[mode]

    def num_accepted(self, mode: str) -> int:
        """Return the tokens of the latest rollout, of all processes, that were measured within the bound."""
        return self._num_accepted[mode]

    def measure(
        self,
        mode: str,
        engine: torch.Tensor,
        learner: torch.Tensor,
        mask: torch.Tensor,
        accelerator: Accelerator,
    ) -> Gap:
        """Measure a part of the latest rollout. Tensors `[B, C]`; only where `mask` is 1."""
        gap, count = logprob_gap(engine, learner, mask), mask.sum().item()
        local = torch.tensor(
            [[gap.mean * count, gap.kl * count, count, gap.max]], device=accelerator.device
        )
        ranks = gather(accelerator, local)
        num_tokens = ranks[:, 2].sum()
        total = num_tokens.clamp(min=1)
        measured = Gap(
            mean=(ranks[:, 0].sum() / total).item(),
            kl=(ranks[:, 1].sum() / total).item(),
            max=ranks[:, 3].max().item(),
            num_tokens=int(num_tokens.item()),
        )
        if measured.mean > self.max_mean or measured.max > self.max_worst:
            self._is_exceeded[mode] = True
        if not self._is_exceeded[mode]:
            self._num_accepted[mode] += measured.num_tokens
        return measured
