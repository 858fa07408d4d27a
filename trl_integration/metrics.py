"""Compute metrics of a rollout for TRL's log, over all processes. `docs/metrics.md` defines each.

Names follow TRL's where TRL has one. Invariant: the figures of all processes are gathered once,
after the rollout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from agent_vllm.engines.base import EngineStats
from agent_vllm.spans import overlap_s
from agent_vllm.types import StopReason, Trajectory
from trl_integration.processes import gather

_COLUMNS = (
    "prompt",
    "sampled",
    "turns",
    "calls",
    "failed",
    "invalid",
    "model_s",
    "tool_s",
    "user_s",
    "truncated",
)


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """Hold the figures of one process."""

    rows: list[list[float]]  # by `_COLUMNS`
    reasons: list[str]
    calls: list[tuple[str, bool, float]]  # tool, whether it failed, seconds
    seconds: float
    overlap_s: float
    stats: EngineStats | None
    num_retries: int


def rollout_metrics(
    trajectories: Sequence[Trajectory],
    *,
    seconds: float,
    stats: EngineStats | None = None,
    num_retries: int = 0,
) -> tuple[dict[str, float], int]:
    """Return metrics by name, and the number of prompt and sampled tokens of all processes.

    Lengths count sampled tokens, whether or not they are trained.

    Args:
        seconds: that the rollout took on this process.
        stats: the engine's counts for it, if the engine keeps any.
        num_retries: requests that were retried.
    """
    figures = _Figures(
        rows=[_row(t) for t in trajectories],
        reasons=[t.stop_reason.value for t in trajectories],
        calls=[call for t in trajectories for call in _calls(t)],
        seconds=seconds,
        overlap_s=_overlap_s(trajectories),
        stats=stats,
        num_retries=num_retries,
    )
    ranks: list[_Figures] = gather_object([figures])
    rows = torch.tensor([row for rank in ranks for row in rank.rows], dtype=torch.float64)
    column: dict[str, torch.Tensor] = dict(zip(_COLUMNS, rows.T, strict=True))
    metrics = {
        **_completion_metrics(column),
        **_rollout_metrics(column, ranks),
        **_tool_metrics([call for rank in ranks for call in rank.calls], len(rows)),
        **_engine_metrics([rank.stats for rank in ranks if rank.stats is not None]),
        "engine/retries": float(sum(rank.num_retries for rank in ranks)),
    }
    return metrics, int((column["prompt"] + column["sampled"]).sum().item())


def _row(trajectory: Trajectory) -> list[float]:
    statuses = [result.status for result in trajectory.tool_results]
    return [
        float(value)
        for value in (
            len(trajectory.prompt_ids),
            trajectory.num_sampled_tokens,
            trajectory.num_turns,
            len(statuses),
            sum(status != "ok" for status in statuses),
            sum(status == "invalid" for status in statuses),
            trajectory.seconds("model"),
            trajectory.seconds("tool"),
            trajectory.seconds("user"),
            trajectory.stop_reason.is_truncated,
        )
    ]


def _calls(trajectory: Trajectory) -> Iterable[tuple[str, bool, float]]:
    """Yield the calls that ran. Others may have any name, which the model made up."""
    for record in trajectory.calls:
        if record.result.status != "invalid" and record.span is not None:
            yield record.result.name, record.result.status == "failed", record.span.seconds


def _overlap_s(trajectories: Sequence[Trajectory]) -> float:
    spans = [span for trajectory in trajectories for span in trajectory.spans]
    model = [(span.start_s, span.end_s) for span in spans if span.kind == "model"]
    others = [(span.start_s, span.end_s) for span in spans if span.kind != "model"]
    return overlap_s(model, others)


def _completion_metrics(column: dict[str, torch.Tensor]) -> dict[str, float]:
    lengths, is_truncated = column["sampled"], column["truncated"].bool()
    num_calls = max(column["calls"].sum().item(), 1)
    return {
        **_length_metrics("completions/{}_length", lengths),
        "completions/clipped_ratio": is_truncated.float().mean().item(),
        **_length_metrics("completions/{}_terminated_length", lengths[~is_truncated]),
        "tools/call_frequency": column["calls"].mean().item(),
        "tools/failure_frequency": column["failed"].sum().item() / num_calls,
        "tools/invalid_frequency": column["invalid"].sum().item() / num_calls,
    }


def _length_metrics(name: str, lengths: torch.Tensor) -> dict[str, float]:
    if lengths.numel() == 0:
        lengths = lengths.new_zeros(1)
    return {
        name.format("mean"): lengths.mean().item(),
        name.format("min"): lengths.min().item(),
        name.format("max"): lengths.max().item(),
    }


def _rollout_metrics(column: dict[str, torch.Tensor], ranks: list[_Figures]) -> dict[str, float]:
    reasons = [reason for rank in ranks for reason in rank.reasons]
    sampled = column["sampled"].sum().item()
    slowest_s = max(rank.seconds for rank in ranks)
    all_s = sum(rank.seconds for rank in ranks)
    return {
        "rollout/turns": column["turns"].mean().item(),
        "rollout/turns_max": column["turns"].max().item(),
        "rollout/seconds": slowest_s,
        "rollout/model_seconds": column["model_s"].mean().item(),
        "rollout/tool_seconds": column["tool_s"].mean().item(),
        "rollout/user_seconds": column["user_s"].mean().item(),
        "rollout/overlap": sum(rank.overlap_s for rank in ranks) / max(all_s, 1e-9),
        "rollout/tokens_per_second": sampled / max(slowest_s, 1e-9),
        **{
            f"rollout/stop_reason/{reason.value}": reasons.count(reason.value) / len(reasons)
            for reason in StopReason
        },
    }


def _tool_metrics(calls: list[tuple[str, bool, float]], num_rows: int) -> dict[str, float]:
    metrics = {}
    for tool in sorted({name for name, _, _ in calls}):
        failed = [has_failed for name, has_failed, _ in calls if name == tool]
        seconds = torch.tensor([seconds for name, _, seconds in calls if name == tool])
        metrics |= {
            f"tools/{tool}/call_frequency": len(failed) / num_rows,
            f"tools/{tool}/failure_frequency": sum(failed) / len(failed),
            f"tools/{tool}/seconds_p50": seconds.quantile(0.5).item(),
            f"tools/{tool}/seconds_p95": seconds.quantile(0.95).item(),
        }
    return metrics


def _engine_metrics(stats: list[EngineStats]) -> dict[str, float]:
    if not stats:
        return {}
    num_prompt_tokens = sum(s.num_prompt_tokens for s in stats)
    num_steps = sum(s.num_steps for s in stats)
    return {
        "engine/prefix_cache_hit_rate": sum(s.num_cached_tokens for s in stats)
        / max(num_prompt_tokens, 1),
        "engine/queue_depth": sum(s.num_waiting for s in stats) / max(num_steps, 1),
    }


def ledger_metrics(ledger: Mapping[str, int], accelerator: Accelerator) -> dict[str, float]:
    """Return the sum of the token ledgers of all processes."""
    local = torch.tensor([list(ledger.values())], device=accelerator.device)
    counts = gather(accelerator, local).sum(dim=0).tolist()
    return {
        f"rollout/{name}_tokens": float(count) for name, count in zip(ledger, counts, strict=True)
    }


def correction_metrics(
    output: Mapping[str, torch.Tensor], accelerator: Accelerator
) -> dict[str, float]:
    """Return the means of TRL's importance-sampling correction, each token counted once.

    TRL averages over processes, however many tokens each has.

    Args:
        output: of TRL's `_generate_and_score_completions`; tensors `[B, C]`, the ratio `[B, 1]` in
            the sequence modes.
    """
    ratio = output["importance_sampling_ratio"]
    mask = (output["completion_mask"] * output["tool_mask"]).bool()
    difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs()[mask]
    ratios = ratio[mask] if ratio.shape == mask.shape else ratio.flatten()
    local = [difference.sum(), difference.numel(), ratios.sum(), ratios.numel()]
    ranks = gather(accelerator, torch.tensor([local], device=accelerator.device))
    difference_sum, num_tokens, ratio_sum, num_ratios = ranks.sum(dim=0).tolist()
    return {
        "sampling/sampling_logp_difference/mean": difference_sum / max(num_tokens, 1),
        "sampling/importance_sampling_ratio/mean": ratio_sum / max(num_ratios, 1),
    }
