"""Turn trajectories into training tensors. The shift and the padding are each written once."""

from agent_vllm.training.collate import TrainingBatch, collate, pad_rows
from agent_vllm.training.logprobs import (
    GapBound,
    LogprobGap,
    gather_logprobs,
    logprob_gap,
    masked_mean,
    predicted_logprobs,
    shift,
)

__all__ = [
    "GapBound",
    "LogprobGap",
    "TrainingBatch",
    "collate",
    "gather_logprobs",
    "logprob_gap",
    "masked_mean",
    "pad_rows",
    "predicted_logprobs",
    "shift",
]
