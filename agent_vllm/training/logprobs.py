"""Compute next-token logprobs: the shift, gathering, masked means, the engine's gap.

Invariant: column i of a shifted tensor belongs to the prediction of `input_ids[:, i + 1]`.

Legend: B rows, T tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch


def shift(per_token: torch.Tensor) -> torch.Tensor:
    """Turn one value per token into one value per prediction: logits at t score token t + 1.

    Args:
        per_token: `[B, T]`, any dtype; column t belongs to token t.

    Returns:
        `[B, T - 1]`; column i belongs to the prediction of token i + 1. The first token of a
        sequence is predicted by nothing and drops out.
    """
    return per_token[:, 1:]


def predicted_logprobs(
    logits: torch.Tensor, input_ids: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return the logprobs of the tokens that followed, under the distribution that is sampled from.

    Args:
        logits: `[B, T, V]`; position t scores token t + 1.
        input_ids: `[B, T]`.
        temperature: divides the logits before the softmax; must be above 0.

    Returns:
        `[B, T - 1]` float32: log-softmax(logits / temperature) at `shift(input_ids)`.
    """
    return gather_logprobs(logits[:, :-1], shift(input_ids), temperature)


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return log-softmax(logits / temperature) at `token_ids`, in float32.

    Args:
        logits: `[..., V]`.
        token_ids: `[...]`.
        temperature: must be above 0.

    Returns:
        `[...]` float32.
    """
    # log_softmax takes the maximum off first, so large logits cost no precision
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values` `[...]` where `mask` `[...]` is set; 0 if it is set nowhere."""
    mask = mask.bool()
    return values.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobGap:
    """Hold the distance of the engine's logprobs from the learner's, over sampled tokens, in nats.

    `kl` estimates KL(engine || learner) per token by k3 = r - 1 - log r with r = learner / engine
    (Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html).
    """

    mean: float
    max: float
    kl: float

    def __str__(self) -> str:
        return f"{self.max:.2g} nats at the worst token, {self.mean:.2g} in the mean"


@dataclass(frozen=True, kw_only=True, slots=True)
class GapBound:
    """Bound a `LogprobGap`, in nats: its mean, and its worst token."""

    mean: float
    worst: float

    def holds(self, gap: LogprobGap) -> bool:
        """Return whether the gap is within the bound; NaN is not."""
        return gap.mean <= self.mean and gap.max <= self.worst

    def __str__(self) -> str:
        return f"at most {self.worst:g} and {self.mean:g}"


def logprob_gap(engine: torch.Tensor, learner: torch.Tensor, mask: torch.Tensor) -> LogprobGap:
    """Compare logprobs of the same tokens. All three `[B, T]`; only where `mask` is 1."""
    log_ratio = (learner - engine).float().masked_fill(~mask.bool(), 0.0)
    distance = log_ratio.abs()
    return LogprobGap(
        mean=masked_mean(distance, mask).item(),
        max=distance.max().item() if distance.numel() else 0.0,
        kl=masked_mean(log_ratio.exp() - 1 - log_ratio, mask).item(),
    )
