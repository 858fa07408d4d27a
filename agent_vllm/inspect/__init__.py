"""Look at rollouts while they run and afterwards.

Recorded rollouts are read by `agent_vllm.record`; its main names are importable from here too.
"""

from agent_vllm.inspect.progress import RolloutProgress
from agent_vllm.record import (
    RolloutRecord,
    RolloutRecorder,
    read_batches,
    read_rollouts,
    redact_secrets,
    to_trajectory,
)

__all__ = [
    "RolloutProgress",
    "RolloutRecord",
    "RolloutRecorder",
    "read_batches",
    "read_rollouts",
    "redact_secrets",
    "to_trajectory",
]
