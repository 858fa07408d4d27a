"""Find the tools, the environment and the simulated user of each dataset row.

Owns how they are checked before training and found by row. Invariant: trouble in making one of them
ends its own trajectory only.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from agent_vllm.chat import ChatFormat
from agent_vllm.environments import Environments, Factory, StartedEnvironment, User
from agent_vllm.errors import EnvironmentDefinitionError
from agent_vllm.tools import Tool, row_function, select_tools, tools_by_name
from agent_vllm.types import Trajectory
from trl_integration.config import AgentGRPOConfig

Row = Mapping[str, Any]
ToolFunctions = Sequence[Tool | Callable[..., Any]]
UserOfRow = Callable[[Row], User | None]

_EXAMPLE = object()


class RowTools:
    """
    The tools that each dataset row offers.

    Args:
        tools: the trainer's `tools`: those of every row, of which a row's `tools` column may pick, or a function from a
            row to its own.

    Attributes:
        functions: the trainer's list as it was given; empty where there is none.
    """

    def __init__(self, tools: ToolFunctions | Callable[[Row], ToolFunctions] | None) -> None:
        self.functions = [] if tools is None or callable(tools) else list(tools)
        self._of_row = row_function(tools) if callable(tools) else None
        self._tools = {} if callable(tools) else tools_by_name(tools)

    def __bool__(self) -> bool:
        return bool(self._tools) or self._of_row is not None

    @property
    def names(self) -> list[str]:
        """Return the names that every row may offer."""
        return list(self._tools)

    @property
    def of_all(self) -> list[Tool]:
        """Return the tools that every row may offer."""
        return list(self._tools.values())

    def of(self, row: Row) -> ToolFunctions:
        if self._of_row is not None:
            return self._of_row(row)
        return select_tools(row.get("tools"), self._tools)


class RowEnvironments:
    """
    The environments and users of a trainer's rows, if it has any.

    Args:
        factory: the trainer's `environment_factory`.
        user: the trainer's `user`.

    Attributes:
        instances: the environments of the latest rollout, one per row, once it is scored; `None` before, and where there
            are none.
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
        Check what can be checked before training.

        Args:
            tool_names: the names of the tools that every row is offered.
            datasets: by the name of the trainer's argument.

        Raises:
            EnvironmentDefinitionError: a name is used twice or is unknown, or `reset` does not take a column.
        """
        if self._environments is not None:
            _check_names(self._environments, tool_names)
            for argument, dataset in datasets.items():
                _check_rows(self._environments, argument, dataset)

    def for_trl(self) -> Factory | dict[str, Factory] | None:
        """Return factories for TRL's constructor, which give it the examples that are here already."""
        if self._environments is None:
            return None
        factories = {
            name: functools.partial(_same, example)
            for name, example in self._environments.examples.items()
        }
        return factories if self._environments.is_routed else factories[None]

    @property
    def reward_types(self) -> Sequence[type]:
        """Return the types of environments that have a `get_reward`."""
        return [] if self._environments is None else self._environments.reward_types

    @property
    def example_tools(self) -> list[Tool]:
        """Return the methods that the model may call, of every kind of environment."""
        return [] if self._environments is None else self._environments.example_tools

    def start(self, rows: Sequence[Mapping[str, Any]], chat: ChatFormat) -> None:
        """Reset an environment per row; control tokens in its messages stay text."""
        self._rows, self.instances = rows, None
        if self._environments is not None:
            self._started = self._environments.start(rows, chat.as_data)

    def prompts(self) -> list[dict[str, Any]]:
        """Return the column that the started environments change, per row."""
        return [{"prompt": started.messages} for started in self._started] or [{}] * len(self._rows)

    def tools(self, index: int) -> list[Tool]:
        return self._started[index].tools if self._started else []

    def user(self, index: int) -> User | None:
        if self._user_of_row is not None:
            return RowUser(self._user_of_row, self._rows[index])
        return self._started[index].user if self._started else None

    @property
    def errors(self) -> list[str | None]:
        """Return per row why it has no environment; None where it has one or needs none."""
        return [started.error for started in self._started] or [None] * len(self._rows)

    def score(
        self, trajectories: list[Trajectory]
    ) -> tuple[list[Trajectory], dict[str, list[Any]]]:
        """Return the trajectories, failed where scoring failed, and columns for reward functions."""
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


class RowUser:
    """Build a row's simulated user on its first call, so that an error in building it ends only its trajectory."""

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
