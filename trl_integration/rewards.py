"""Call reward functions with their columns, and keep failed trajectories from them.

Invariant: no reward function sees a trajectory that failed, and its rewards reach the rows that it
was given.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from trl.trainer.utils import is_async_callable

from agent_vllm.types import StopReason, Trajectory

_UNSEEN = 0.0  # the trainer writes NaN over it


def reward_columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return what reward functions get beside the dataset's columns, one entry per row."""
    return {
        "stop_reason": [t.stop_reason.value for t in trajectories],
        "turn_outputs": [t.turn_outputs for t in trajectories],
        "num_turns": [t.num_turns for t in trajectories],
        "num_calls": [len(t.tool_results) for t in trajectories],
        "num_invalid_calls": [
            sum(result.status == "invalid" for result in t.tool_results) for t in trajectories
        ],
    }


def isolated_rewards(reward_funcs: Sequence[Any], environment_types: Sequence[type]) -> list[Any]:
    """
    Wrap a trainer's reward functions so that none sees a failed trajectory.

    Args:
        reward_funcs: those of the user, then one per type of `environment_types`, which TRL added.
        environment_types: environments with a `get_reward`, whose rewards are computed elsewhere.
    """
    users = reward_funcs[: len(reward_funcs) - len(environment_types)]
    trls = reward_funcs[len(users) :]
    own = [
        functools.partial(_own_reward, kind, function)
        for kind, function in zip(environment_types, trls, strict=True)
    ]
    return [without_failures(function) for function in [*users, *own]]


def _own_reward(
    kind: type,
    trls: Callable[..., Any],
    /,
    environments: Sequence[Any],
    environment_reward: Sequence[float | None] | None = None,
    **_: Any,
) -> Any:
    if environment_reward is None:  # the user calls it, not the trainer
        return trls(environments=environments)
    pairs = zip(environments, environment_reward, strict=True)
    return [reward if type(environment) is kind else None for environment, reward in pairs]


def without_failures(function: Any) -> Any:
    """
    Wrap a reward function so that it is called with the rows whose trajectories did not fail.

    Reward models stay as they are: they read nothing but messages. So does a call without the trainer's columns.
    """
    if isinstance(function, nn.Module):
        return function

    if is_async_callable(function):

        async def score_async(**columns: Any) -> Any:
            if "stop_reason" not in columns:
                return await function(**columns)
            rows = _Rows(columns)
            return rows.spread(await function(**rows.shown) if rows.kept else [])

        return score_async

    def score(**columns: Any) -> Any:
        if "stop_reason" not in columns:
            return function(**columns)
        rows = _Rows(columns)
        return rows.spread(function(**rows.shown) if rows.kept else [])

    return score


class _Rows:
    """Hold the columns of a batch without the rows of failed trajectories."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        reasons = columns["stop_reason"]
        self._num_rows = len(reasons)
        self.kept = [i for i, reason in enumerate(reasons) if not StopReason(reason).is_failure]
        self.shown = {name: self._of_kept(value) for name, value in columns.items()}
        self._log_extra = columns["log_extra"]
        self.shown["log_extra"] = self._log_column

    def _of_kept(self, value: Any) -> Any:
        return [value[index] for index in self.kept] if isinstance(value, list) else value

    def _log_column(self, column: str, values: Sequence[Any]) -> None:
        self._log_extra(column, self._with_gaps(values, None))

    def spread(self, rewards: Any) -> list[Any]:
        """Return the rewards at the places of their rows."""
        rewards = list(rewards)
        if len(self.kept) == self._num_rows:
            return rewards
        if len(rewards) != len(self.kept):
            raise ValueError(
                f"A reward function must return one reward for each completion, got {len(rewards)} for "
                f"{len(self.kept)} completions."
            )
        return self._with_gaps(rewards, _UNSEEN)

    def _with_gaps(self, values: Sequence[Any], gap: Any) -> list[Any]:
        at_rows = dict(zip(self.kept, values, strict=True))
        return [at_rows.get(row, gap) for row in range(self._num_rows)]
