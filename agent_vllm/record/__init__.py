"""Write, read, replay and redact recorded rollouts.

Owns the file format (`docs/records.md`): nothing outside this room writes or parses it.
"""

from agent_vllm.record.reader import (
    batch_name,
    read_batches,
    read_rollouts,
    record_path,
    to_trajectory,
)
from agent_vllm.record.redaction import redact_secrets
from agent_vllm.record.replay import ReplayRolloutEngine, recorded_tools
from agent_vllm.record.schema import RolloutRecord
from agent_vllm.record.writer import Redact, RolloutRecorder

__all__ = [
    "Redact",
    "ReplayRolloutEngine",
    "RolloutRecord",
    "RolloutRecorder",
    "batch_name",
    "read_batches",
    "read_rollouts",
    "record_path",
    "recorded_tools",
    "redact_secrets",
    "to_trajectory",
]
