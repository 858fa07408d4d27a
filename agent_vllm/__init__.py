"""Multi-turn tool rollouts with every token accounted for. Knows nothing of TRL's trainers.

Names are imported on first use, so that `import agent_vllm` and the command line start fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "agent_vllm.batch": {"TrainingBatch", "collate"},
    "agent_vllm.chat": {"ChatFormat"},
    "agent_vllm.engines": {
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
    "agent_vllm.tools": {"Tool"},
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (module for module, names in _MODULES.items() if name in names)
    value = getattr(importlib.import_module(next(homes, "agent_vllm.types")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
