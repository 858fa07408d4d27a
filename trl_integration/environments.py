"""Environments and users as the trainer has them: checked before training, scored by row.

Owns what TRL's side needs to know of them. Invariant: no reward function sees a trajectory that
failed, and what it says of the others reaches their own rows.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from torch import nn
from trl.trainer.utils import is_async_callable

from agent_vllm.chat import ChatFormat
from agent_vllm.environments import Environments, Factory, StartedEnvironment, User
from agent_vllm.errors import EnvironmentDefinitionError
from agent_vllm.tools import Tool
from agent_vllm.types import StopReason, Trajectory
from trl_integration.config import AgentGRPOConfig

UserOfRow = Callable[[Mapping[str, Any]], User | None]

_UNSEEN = 0.0  # the trainer writes NaN over it
_EXAMPLE = object()


class RowEnvironments:
    """
    The environments and users of a trainer's rows, if it has any.

    Args:
        factory: the trainer's `environment_factory`.
        user: the trainer's `user`.

    Attributes:
        instances: the environment of each row of the latest rollout once it is scored, as reward functions get them; `None`
            before, and where there are no environments.
    """

    def __init__(
        self,
        factory: Factory | dict[str, Factory] | None,
        user: UserOfRow | None,
        args: AgentGRPOConfig,
    ) -> None:
        if user is not None and not callable(user):
            raise TypeError(
                f"`user` must be a function from a dataset row to the row's user, got {user!r}."
            )
        self._user_of_row = user
        self._rows: Sequence[Mapping[str, Any]] = []
        self._started: list[StartedEnvironment] = []
        self.instances: list[Any] | None = None
        self._environments = None
        if factory is not None:
            is_fresh, timeout_s = args.fresh_environments, args.environment_timeout_s
            self._environments = Environments(factory, is_fresh=is_fresh, timeout_s=timeout_s)
        if user is not None and self._environments is not None and self._environments.have_users:
            raise EnvironmentDefinitionError(
                "`user` must be left out where an environment has `get_user_message`: nobody could "
                "tell which of the two answers the model."
            )

    def __bool__(self) -> bool:
        return self._environments is not None

    @property
    def have_users(self) -> bool:
        is_in_environment = self._environments is not None and self._environments.have_users
        return self._user_of_row is not None or is_in_environment

    def check(self, tool_names: Sequence[str], datasets: Mapping[str, Dataset]) -> None:
        """
        What can be told before training.

        Args:
            tool_names: of the tools that every row is offered.
            datasets: by the name of the trainer's argument.

        Raises:
            EnvironmentDefinitionError: a name that two things have or that nothing has, or a column that `reset` refuses.
        """
        if self._environments is not None:
            _check_names(self._environments, tool_names)
            for argument, dataset in datasets.items():
                _check_rows(self._environments, argument, dataset)

    def for_trl(self) -> Factory | dict[str, Factory] | None:
        """What TRL's constructor makes its examples of: those that are here already."""
        if self._environments is None:
            return None
        factories = {
            name: functools.partial(_same, example)
            for name, example in self._environments.examples.items()
        }
        return factories if self._environments.is_routed else factories[None]

    def isolated(self, reward_funcs: Sequence[Any]) -> list[Any]:
        """The trainer's reward functions, TRL's calls of `get_reward` at their end, each made safe."""
        types = [] if self._environments is None else self._environments.reward_types
        users = reward_funcs[: len(reward_funcs) - len(types)]
        own = [functools.partial(_own_reward, kind) for kind in types]
        return [without_failures(function) for function in [*users, *own]]

    def start(self, rows: Sequence[Mapping[str, Any]], chat: ChatFormat) -> None:
        """Reset an environment for each row; control tokens in what it says stay text."""
        self._rows, self.instances = rows, None
        if self._environments is not None:
            self._started = self._environments.start(rows, chat.as_data)

    def prompts(self) -> list[dict[str, Any]]:
        """The column that the started environments change in their rows."""
        return [{"prompt": started.messages} for started in self._started] or [{}] * len(self._rows)

    def tools(self, index: int) -> list[Tool]:
        return self._started[index].tools if self._started else []

    def user(self, index: int) -> User | None:
        if self._user_of_row is not None:
            return RowUser(self._user_of_row, self._rows[index])
        return self._started[index].user if self._started else None

    @property
    def errors(self) -> list[str | None]:
        """Why a row has no environment, None where it has all that it needs."""
        return [started.error for started in self._started] or [None] * len(self._rows)

    def score(
        self, trajectories: list[Trajectory]
    ) -> tuple[list[Trajectory], dict[str, list[Any]]]:
        """The trajectories, whose scoring may have failed, and the columns for reward functions."""
        if self._environments is None:
            return trajectories, {}
        trajectories, rewards = self._environments.score(trajectories)
        self.instances = [started.environment for started in self._started]
        return trajectories, {"environment_reward": rewards}

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()


def _same(value: Any) -> Any:
    return value


def _check_names(environments: Environments, tool_names: Sequence[str]) -> None:
    for name, example in environments.examples.items():
        clashes = sorted(set(environments.tool_names(name)) & set(tool_names))
        if clashes:
            raise EnvironmentDefinitionError(
                f"`tools` must not have the name of an environment's method, got {clashes[0]!r}, "
                f"which `{type(example).__name__}` has too. The model calls tools by name: rename "
                "one."
            )


def _check_rows(environments: Environments, argument: str, dataset: Dataset) -> None:
    columns, names = list(dataset.column_names), [None]
    if environments.is_routed:
        if "environment" not in columns:
            raise EnvironmentDefinitionError(
                f"`{argument}` must have a column 'environment', got {columns}. With several "
                "environments each row names its own."
            )
        columns.remove("environment")
        names = dataset.unique("environment")
    for name in names:
        environments.check_name(name)
        example = environments.examples[name]
        try:
            inspect.signature(example.reset).bind(**dict.fromkeys(columns, _EXAMPLE))
        except TypeError as error:
            raise EnvironmentDefinitionError(
                f"`{type(example).__name__}.reset` must take the columns of `{argument}`, "
                f"{columns}: {error}. Give it `**kwargs` for those that it does not need."
            ) from error


def _own_reward(
    kind: type, /, environments: Sequence[Any], environment_reward: Sequence[float | None], **_: Any
) -> list[float | None]:
    pairs = zip(environments, environment_reward, strict=True)
    return [reward if type(environment) is kind else None for environment, reward in pairs]


def without_failures(function: Any) -> Any:
    """
    The same reward function, called with the rows whose trajectories did not fail.

    Reward models stay as they are: they read nothing but messages.
    """
    if isinstance(function, nn.Module):
        return function

    if is_async_callable(function):

        async def score_async(**columns: Any) -> list[Any]:
            rows = _Rows(columns)
            return rows.spread(await function(**rows.shown) if rows.kept else [])

        return score_async

    def score(**columns: Any) -> list[Any]:
        rows = _Rows(columns)
        return rows.spread(function(**rows.shown) if rows.kept else [])

    return score


class _Rows:
    """The columns of a batch, those of failed trajectories taken out."""

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
        """The rewards at their rows' places."""
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


class RowUser:
    """A row's simulated user, made when it is first asked: trouble in making it is its trajectory's own."""

    def __init__(self, user_of_row: UserOfRow, row: Mapping[str, Any]) -> None:
        self._user_of_row = user_of_row
        self._row = row
        self._user: User | None = None
        self._is_made = False

    def __call__(self, messages: list[dict[str, Any]]) -> Any:
        if not self._is_made:
            self._user = self._user_of_row(self._row)
            self._is_made = True
        return None if self._user is None else self._user(messages)
