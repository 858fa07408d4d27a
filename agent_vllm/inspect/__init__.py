"""Look at rollouts: live progress and recorded trajectories."""

from agent_vllm.inspect.progress import RolloutProgress
from agent_vllm.inspect.record import RolloutRecorder, read_rollouts

__all__ = ["RolloutProgress", "RolloutRecorder", "read_rollouts"]
