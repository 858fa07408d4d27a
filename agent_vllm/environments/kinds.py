"""Describe a class of environments: the tools that it offers and which optional methods it has."""

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_vllm.errors import EnvironmentDefinitionError, ToolDefinitionError
from agent_vllm.tools import Tool, as_tool

Factory = Callable[[], Any]

LIFECYCLE = ("reset", "get_tools", "get_reward", "get_user_message")
"""Public methods that the model may not call."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """List the methods of a class of environments.

    Attributes:
        tools: the methods that the model may call, by name, bound to no instance.
        has_tools: whether it has `get_tools`.
        has_reward: whether it has `get_reward`.
        has_user: whether it has `get_user_message`.
    """

    tools: dict[str, Tool]
    has_tools: bool
    has_reward: bool
    has_user: bool


_kinds: weakref.WeakKeyDictionary[type, Kind] = weakref.WeakKeyDictionary()


def kind_of(environment: Any) -> Kind:
    """Return the kind of an environment; each class is described once.

    Raises:
        EnvironmentDefinitionError: it has no `reset`, or a public method that can't be described.
    """
    kind = _kinds.get(type(environment))
    if kind is None:
        kind = _kinds[type(environment)] = _described(environment)
    return kind


def checked_factories(factories: Any) -> dict[str | None, Factory]:
    """Return the factories by name; None is the name of a single one.

    Raises:
        EnvironmentDefinitionError: there is none, or one can't be called.
    """
    named: dict[str | None, Factory]
    named = dict(factories) if isinstance(factories, Mapping) else {None: factories}
    if not named:
        raise EnvironmentDefinitionError(
            "`environment_factory` must hold at least one factory, got an empty dict."
        )
    for name, factory in named.items():
        if not callable(factory):
            where = "" if name is None else f"[{name!r}]"
            raise EnvironmentDefinitionError(
                f"`environment_factory{where}` must be a class or function that makes an "
                f"environment, got {factory!r}. Give the class itself, not an instance."
            )
    return named


def _described(environment: Any) -> Kind:
    """Look for methods where TRL looks for them: among the functions of the class."""
    name = type(environment).__name__
    methods = [method for method, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    if "reset" not in methods:
        raise EnvironmentDefinitionError(
            f"Environment `{name}` must have a method `reset(self, **row)`. It is called before "
            "each trajectory; what it returns, None or text, is added to the prompt."
        )
    tools = [m for m in methods if m not in LIFECYCLE and not m.startswith("_")]
    return Kind(
        tools={tool: _tool(environment, tool) for tool in tools},
        has_tools="get_tools" in methods,
        has_reward="get_reward" in methods,
        has_user="get_user_message" in methods,
    )


def _tool(environment: Any, method: str) -> Tool:
    kind = type(environment)
    try:
        tool = as_tool(getattr(environment, method))
        return dataclasses.replace(tool, function=getattr(kind, method))
    except ToolDefinitionError as error:
        raise EnvironmentDefinitionError(
            f"Environment `{kind.__name__}` offers its public methods to the model. {error} If one "
            "is not for the model, begin its name with an underscore."
        ) from error
