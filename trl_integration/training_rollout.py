"""Hold the state of one rollout between the methods that TRL calls.

Invariant: who is excluded from training is decided here, from the ending of a trajectory, from its
rewards and from the engine's gap to the learner, and read everywhere else.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_vllm.engines.base import EngineStats
from agent_vllm.tools import Tool
from agent_vllm.types import Trajectory
from trl_integration.fields import Exclusion, exclusion

Tools = list[Tool | Callable[..., Any]]


@dataclass(kw_only=True, slots=True)
class TrainingRollout:
    """
    One rollout on one process, from its rows to who is trained on it.

    The fields are set from top to bottom: when it starts, when `finish` gets the trajectories, when `score` gets the
    rewards.

    Legend: B rows, the samples of a prompt together; F reward functions.
    """

    mode: str  # "train" or "eval"
    step: int  # optimizer steps made so far
    seed: int
    rows: list[dict[str, Any]]  # [B] the dataset's columns
    tools: list[Tools]  # [B]

    started: float = 0.0  # Unix time of the first request
    seconds: float = 0.0
    num_retries: int = 0  # requests that were retried
    engine_stats: EngineStats | None = None  # of this rollout; None if the engine keeps none
    trajectories: list[Trajectory] = field(default_factory=list)  # [B]
    reward_columns: dict[str, list[Any]] = field(default_factory=dict)  # lists are [B]
    exclusions: list[Exclusion | None] = field(default_factory=list)  # [B] None where trained

    rewards: torch.Tensor  # [B, F] NaN until scored, and where a function returned None

    @classmethod
    def empty(cls) -> "TrainingRollout":
        """Return a rollout without rows, for before the first one."""
        return cls(mode="train", step=0, seed=0, rows=[], tools=[], rewards=torch.empty(0, 0))

    def finish(self, trajectories: Sequence[Trajectory], *, mask_truncated: bool) -> None:
        """Set the trajectories, and exclude those that their ending keeps from being trained."""
        self.trajectories = list(trajectories)
        self.exclusions = [exclusion(t, mask_truncated=mask_truncated) for t in self.trajectories]

    def score(self, rewards: torch.Tensor) -> None:
        """Set the rewards `[B, F]`, and exclude the trajectories that no function scored."""
        self.rewards = rewards
        is_unscorable = rewards.isnan().all(dim=1).tolist()
        self.exclusions = [
            reason or (Exclusion.UNSCORABLE if is_nan else None)
            for reason, is_nan in zip(self.exclusions, is_unscorable, strict=True)
        ]

    def mismatch(self) -> None:
        """Exclude what is left: the engine's logprobs are too far from the learner's."""
        self.exclusions = [reason or Exclusion.MISMATCHED for reason in self.exclusions]

    @property
    def is_failed(self) -> list[bool]:  # [B]
        return [reason is Exclusion.FAILED for reason in self.exclusions]

    @property
    def is_trained(self) -> list[bool]:  # [B]
        return [reason is None for reason in self.exclusions]


class RolloutSeeds:
    """
    The seeds of one process's rollouts.

    They differ by rank, mode, step and rollout. A resumed run gets the seeds that it would have had.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._run = f"{seed}/{rank}"
        self._rollout_at: dict[tuple[str, int], int] = {}  # its number at this mode and step

    def next(self, mode: str, step: int) -> int:
        key = (mode, step)
        number = self._rollout_at.get(key, -1) + 1
        self._rollout_at = {key: number}
        return random.Random(f"{self._run}/{key}/{number}").getrandbits(63)

    def give_back(self) -> None:
        """Give the latest seed to the next rollout, which retries it."""
        self._rollout_at = {key: number - 1 for key, number in self._rollout_at.items()}
