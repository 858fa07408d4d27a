"""Roll out trajectories: many at once, each at its own pace.

`batch` starts them, `episode` is the story of one, `budget` is the arithmetic of its limits,
`status` says how far they are.
"""

from agent_vllm.rollout.batch import (
    rollout_batch,
    rollout_batch_async,
    rollout_single,
    rollout_single_async,
)
from agent_vllm.rollout.episode import RolloutTask
from agent_vllm.rollout.status import RolloutStatus

__all__ = [
    "RolloutStatus",
    "RolloutTask",
    "rollout_batch",
    "rollout_batch_async",
    "rollout_single",
    "rollout_single_async",
]
