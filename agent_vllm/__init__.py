"""Multi-turn tool rollouts with every token accounted for. Knows nothing of TRL's trainers.

Names are imported on first use, so that `import agent_vllm` and the command line start fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_vllm.chat import ChatFormat
    from agent_vllm.engines import (
        GenerationRequest,
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
    from agent_vllm.settings import Limits, SamplingParams
    from agent_vllm.tools import Tool
    from agent_vllm.training import TrainingBatch, collate
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

__version__ = "0.1.0"

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

_ROOMS = {  # the others are in `agent_vllm.types`
    "agent_vllm.training": {"TrainingBatch", "collate"},
    "agent_vllm.chat": {"ChatFormat"},
    "agent_vllm.engines": {
        "GenerationRequest",
        "RolloutEngine",
        "RolloutResult",
        "TorchRolloutEngine",
        "VLLMRolloutEngine",
        "VLLMServerRolloutEngine",
        "create_rollout_engine",
    },
    "agent_vllm.rollout": {
        "RolloutStatus",
        "rollout_batch",
        "rollout_batch_async",
        "rollout_single",
        "rollout_single_async",
    },
    "agent_vllm.settings": {"Limits", "SamplingParams"},
    "agent_vllm.tools": {"Tool"},
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    rooms = (room for room, names in _ROOMS.items() if name in names)
    value = getattr(importlib.import_module(next(rooms, "agent_vllm.types")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
