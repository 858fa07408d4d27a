"""Roll out trajectories: many at once, each at its own pace.

`batch` starts them, `episode` decides what follows each turn of one, `sampler` samples its turns,
`story` holds it, `budget` is the arithmetic of its limits, `status` says how far they are.
"""

from agent_vllm.rollout.batch import (
    check_options,
    rollout_batch,
    rollout_batch_async,
    rollout_single,
    rollout_single_async,
    run_all,
    turn_samplers,
)
from agent_vllm.rollout.budget import Budget
from agent_vllm.rollout.episode import RolloutTask
from agent_vllm.rollout.observations import with_results, with_user_message
from agent_vllm.rollout.sampler import NewTurn, RolloutContext, TurnFailed, TurnSampler
from agent_vllm.rollout.status import RolloutStatus
from agent_vllm.rollout.story import Story

__all__ = [
    "Budget",
    "NewTurn",
    "RolloutContext",
    "RolloutStatus",
    "RolloutTask",
    "Story",
    "TurnFailed",
    "TurnSampler",
    "check_options",
    "rollout_batch",
    "rollout_batch_async",
    "rollout_single",
    "rollout_single_async",
    "run_all",
    "turn_samplers",
    "with_results",
    "with_user_message",
]
