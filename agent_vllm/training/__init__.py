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
from agent_vllm.training.tree import PrefixTree
from agent_vllm.training.tree_attention import (
    TREE_ATTENTION,
    reason_against_tree,
    tree_inputs,
    tree_logprobs,
    use_tree_attention,
)

__all__ = [
    "TREE_ATTENTION",
    "GapBound",
    "LogprobGap",
    "PrefixTree",
    "TrainingBatch",
    "collate",
    "gather_logprobs",
    "logprob_gap",
    "masked_mean",
    "pad_rows",
    "predicted_logprobs",
    "reason_against_tree",
    "shift",
    "tree_inputs",
    "tree_logprobs",
    "use_tree_attention",
]
