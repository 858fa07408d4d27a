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
from agent_vllm.rollout import (
    RolloutStatus,
    rollout_batch,
    rollout_batch_async,
    rollout_single,
    rollout_single_async,
)
from agent_vllm.tools import Tool
from agent_vllm.types import (
    Completion,
    Limits,
    Segment,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
)

__version__ = "0.1.0"

__all__ = [
    "ChatFormat",
    "Completion",
    "Limits",
    "RolloutEngine",
    "RolloutResult",
    "RolloutStatus",
    "Segment",
    "StopReason",
    "Tool",
    "ToolCall",
    "ToolResult",
    "TorchRolloutEngine",
    "TrainingBatch",
    "Trajectory",
    "VLLMRolloutEngine",
    "VLLMServerRolloutEngine",
    "collate",
    "create_rollout_engine",
    "rollout_batch",
    "rollout_batch_async",
    "rollout_single",
    "rollout_single_async",
]
