"""Figures of a rollout for TRL's log, over all processes. Names follow TRL's where TRL has one."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from agent_vllm.logprobs import logprob_gap
from agent_vllm.types import StopReason, Trajectory

_COLUMNS = (
    "prompt",
    "sampled",
    "turns",
    "calls",
    "failed",
    "model_s",
    "tool_s",
    "truncated",
)


def rollout_metrics(
    trajectories: Sequence[Trajectory], accelerator: Accelerator
) -> tuple[dict[str, float], int]:
    """Metrics by name, and the prompt and sampled tokens of all processes together.

    Lengths count sampled tokens, whether or not they are trained.
    """
    rows = torch.tensor(
        [_row(t) for t in trajectories], dtype=torch.float32, device=accelerator.device
    )
    reasons = torch.tensor(
        [[t.stop_reason is reason for reason in StopReason] for t in trajectories],
        device=accelerator.device,
    )
    rows, reasons = accelerator.gather((rows, reasons.float()))
    column = dict(zip(_COLUMNS, rows.T, strict=True))
    lengths, is_truncated = column["sampled"], column["truncated"].bool()
    num_calls = column["calls"].sum().item()
    metrics = {
        **_length_metrics("completions/{}_length", lengths),
        "completions/clipped_ratio": is_truncated.float().mean().item(),
        **_length_metrics("completions/{}_terminated_length", lengths[~is_truncated]),
        "tools/call_frequency": column["calls"].mean().item(),
        "tools/failure_frequency": column["failed"].sum().item() / max(num_calls, 1),
        "rollout/turns": column["turns"].mean().item(),
        "rollout/model_seconds": column["model_s"].mean().item(),
        "rollout/tool_seconds": column["tool_s"].mean().item(),
    }
    for reason, share in zip(StopReason, reasons.mean(dim=0).tolist(), strict=True):
        metrics[f"rollout/stop_reason/{reason.value}"] = share
    return metrics, int((column["prompt"] + column["sampled"]).sum().item())


def _row(trajectory: Trajectory) -> list[float]:
    return [
        len(trajectory.prompt_ids),
        trajectory.num_sampled_tokens,
        trajectory.num_turns,
        len(trajectory.tool_results),
        sum(result.status != "ok" for result in trajectory.tool_results),
        trajectory.seconds("model"),
        trajectory.seconds("tool"),
        trajectory.stop_reason.is_truncated,
    ]


def _length_metrics(name: str, lengths: torch.Tensor) -> dict[str, float]:
    if lengths.numel() == 0:
        lengths = lengths.new_zeros(1)
    return {
        name.format("mean"): lengths.mean().item(),
        name.format("min"): lengths.min().item(),
        name.format("max"): lengths.max().item(),
    }


class GapMeter:
    """The engine's logprobs against the learner's, while both hold the same weights."""

    def __init__(self) -> None:
        self._policy_version: int | None = None

    def expect(self, policy_version: int) -> None:
        """A rollout was made with this version."""
        self._policy_version = policy_version

    def measure(
        self,
        policy_version: int,
        engine: torch.Tensor,
        learner: torch.Tensor,
        mask: torch.Tensor,
        accelerator: Accelerator,
    ) -> dict[str, float]:
        """Metrics over all processes; none once the learner has moved on. Tensors `[B, C]`."""
        if policy_version != self._policy_version:
            return {}
        gap, count = logprob_gap(engine, learner, mask), mask.sum().item()
        local = torch.tensor(
            [[gap.mean * count, gap.kl * count, count, gap.max]], device=accelerator.device
        )
        ranks = accelerator.gather(local)
        total = ranks[:, 2].sum().clamp(min=1)
        return {
            "sampling/logprob_gap/mean": (ranks[:, 0].sum() / total).item(),
            "sampling/logprob_gap/kl": (ranks[:, 1].sum() / total).item(),
            "sampling/logprob_gap/max": ranks[:, 3].max().item(),
        }
