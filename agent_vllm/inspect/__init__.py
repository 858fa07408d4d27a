"""Look at rollouts: live progress, recorded trajectories, and what can be made of them."""

from agent_vllm.inspect.progress import RolloutProgress
from agent_vllm.inspect.read import read_batches, read_rollouts, to_trajectory
from agent_vllm.inspect.record import RolloutRecorder
from agent_vllm.inspect.redact import redact_secrets
from agent_vllm.inspect.schema import RolloutRecord

__all__ = [
    "RolloutProgress",
    "RolloutRecord",
    "RolloutRecorder",
    "read_batches",
    "read_rollouts",
    "redact_secrets",
    "to_trajectory",
]
