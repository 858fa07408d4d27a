"""Read a learner: its weights under plain names, and what an engine must know of its model."""

from agent_vllm.engines.learner.peft import plain_model, runs_as_reference
from agent_vllm.engines.learner.self_check import check_against_learner, gap_bound, gap_to
from agent_vllm.engines.learner.sharding import plain_class
from agent_vllm.engines.learner.source import (
    ModelSource,
    model_source,
    own_config,
    vocabulary_size,
)
from agent_vllm.engines.learner.weights import LearnerWeights, check_shapes

__all__ = [
    "LearnerWeights",
    "ModelSource",
    "check_against_learner",
    "check_shapes",
    "gap_bound",
    "gap_to",
    "model_source",
    "own_config",
    "plain_class",
    "plain_model",
    "runs_as_reference",
    "vocabulary_size",
]
