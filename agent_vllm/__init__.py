"""Multi-turn tool rollouts with every token accounted for. Knows nothing of TRL's trainers."""

from agent_vllm.batch import TrainingBatch, collate
from agent_vllm.chat import ChatFormat
from agent_vllm.engines import (
    RolloutEngine,
    RolloutResult,
    TorchRolloutEngine,
    VLLMRolloutEngine,
    VLLMServerRolloutEngine,
    create_rollout_engine,
)
from agent_vllm.engines.base import GenerationRequest
from agent_vllm.rollout import (
    RolloutStatus,
    rollout_batch,
    rollout_batch_async,
    rollout_single,
    rollout_single_async,
)
from agent_vllm.settings import Limits, SamplingParams
from agent_vllm.tools import Tool
from agent_vllm.types import (
    CallRecord,
    Completion,
    Segment,
    Span,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

__all__ = [
    "CallRecord",
    "ChatFormat",
    "Completion",
    "GenerationRequest",
    "Limits",
    "RolloutEngine",
    "RolloutResult",
    "RolloutStatus",
    "SamplingParams",
    "Segment",
    "Span",
    "StopReason",
    "Tool",
    "ToolCall",
    "ToolResult",
    "TorchRolloutEngine",
    "TrainingBatch",
    "Trajectory",
    "Turn",
    "VLLMRolloutEngine",
    "VLLMServerRolloutEngine",
    "collate",
    "create_rollout_engine",
    "rollout_batch",
    "rollout_batch_async",
    "rollout_single",
    "rollout_single_async",
]
