"""Describe a function to the model, and say how its calls may be run.

Owns how a Python function becomes a schema. Invariant: a tool that was built has a schema that
arguments can be checked against.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.tools.arguments import argument_errors, schema_problem, validator_of
from agent_vllm.tools.signature import Signature, signature_of

RunsIn = Literal["thread", "one_thread", "main"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool:
    """Describe a function that the model may call.

    Attributes:
        schema: what the chat template sees, `{"type": "function", "function": {"name",
            "description", "parameters"}}`, as `transformers.utils.get_json_schema` gives it. By
            default it is made from the function's type hints and docstring.
        function: sync or async; gets the arguments by keyword.
        ends_episode: a call that succeeds ends the trajectory (a "final answer" tool).
        max_concurrency: calls of this tool that run at one time in a rollout, None for no limit.
        max_calls_per_s: how many calls may start per second, None for no limit.
        max_retries: how often a call that raised or timed out is retried. Only for tools that are
            safe to call twice.
        runs_in: where a sync function runs. "thread": on threads that calls share. "one_thread": on
            one thread for the program's life, shared by all tools that say so, for what may only
            be used where it was opened (SQLite, Playwright). "main": on the thread that called
            `train` or `rollout_batch`, as in TRL, for signals and for what the script has opened;
            a call can't be interrupted there.
        converters: of arguments that the function takes as enums, dates, models and the like; made
            with the schema. With a schema of your own the function gets plain JSON.
    """

    schema: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any]
    ends_episode: bool = False
    max_concurrency: int | None = None
    max_calls_per_s: float | None = None
    max_retries: int = 0
    runs_in: RunsIn = "thread"
    converters: Mapping[str, TypeAdapter[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.schema:
            signature = _described(self.function)
            object.__setattr__(self, "schema", signature.schema)
            object.__setattr__(self, "converters", signature.converters)
        self._check_limits()
        for key in ("name", "description"):
            value = self.schema["function"].get(key, "")
            if not isinstance(value, str):
                raise ToolDefinitionError(f"A tool's `{key}` must be text, got {value!r}.")
        try:
            problem = schema_problem(json.dumps(self._parameters))
        except (TypeError, ValueError) as error:
            problem = f"are no JSON: {error}"
        if problem is not None:
            raise ToolDefinitionError(f"The parameters of tool `{self.name}` {problem}.")

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @functools.cached_property
    def schema_text(self) -> str:
        """Return the schema as JSON; the same for tools that the model can't tell apart."""
        return json.dumps(dict(self.schema))

    @functools.cached_property
    def is_async(self) -> bool:
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an object's async __call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @functools.cached_property
    def _validator(self) -> Any:
        return validator_of(self._parameters)

    @functools.cached_property
    def _parameters(self) -> dict[str, Any]:
        parameters = self.schema["function"].get("parameters") or {}
        return {"type": "object", "additionalProperties": False, **parameters}

    def argument_errors(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return what is wrong with the arguments, in the schema's terms; empty if they fit."""
        return argument_errors(self._validator, arguments)

    @property
    def takes_nothing(self) -> bool:
        return not self._parameters.get("properties")

    def _check_limits(self) -> None:
        for name in ("max_concurrency", "max_calls_per_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ToolDefinitionError(
                    f"`{name}` of tool `{self.name}` must be more than 0, got {value}. Use None "
                    "for no limit."
                )
        if self.max_retries < 0:
            raise ToolDefinitionError(
                f"`max_retries` of tool `{self.name}` must be 0 or more, got {self.max_retries}."
            )
        if self.runs_in not in get_args(RunsIn):
            raise ToolDefinitionError(
                f"`runs_in` of tool `{self.name}` must be one of {get_args(RunsIn)}, got "
                f"{self.runs_in!r}. For a process of its own use `isolated(tool)`."
            )
        if self.is_async and self.runs_in != "thread":
            raise ToolDefinitionError(
                f"`runs_in` of tool `{self.name}` must be left out, got {self.runs_in!r}. Async "
                "functions, isolated tools and tools of an environment have a place of their own."
            )


def as_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """Make a `Tool` from a Python function with type hints and a Google-style docstring.

    Raises:
        ToolDefinitionError: the function can't be described to the model; says what is missing.
    """
    if isinstance(tool, Tool):
        return tool
    if not callable(tool):
        raise ToolDefinitionError(
            f"A tool must be a function or an `agent_vllm.tools.Tool`, got {tool!r}."
        )
    return Tool(function=tool)


def _described(function: Callable[..., Any]) -> Signature:
    try:
        return signature_of(function)
    except Exception as error:  # the parser of hints and docstrings raises many kinds
        name = getattr(function, "__name__", repr(function))
        raise ToolDefinitionError(
            f"Tool `{name}` can't be described to the model: {error} Give every argument a type "
            "hint, and the function a Google-style docstring with a line for each argument."
        ) from error


def tools_by_name(tools: Iterable[Tool | Callable[..., Any]] | None) -> dict[str, Tool]:
    """Return the tools in order, by the name that the model uses.

    Raises:
        ToolDefinitionError: no list was given, a tool can't be described, or two have one name.
    """
    if isinstance(tools, Tool) or inspect.isroutine(tools):
        raise _no_list(tool_name(tools))
    named: dict[str, Tool] = {}
    for tool in map(as_tool, tools or ()):
        if tool.name in named:
            raise ToolDefinitionError(
                f"Two tools are named `{tool.name}`. The model calls tools by name: rename one."
            )
        named[tool.name] = tool
    return named


def row_function(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function from a row to the row's tools, after checking that it is no tool itself.

    Raises:
        ToolDefinitionError: it takes other arguments than a row, or is described as a tool is.
    """
    parameters = inspect.signature(function).parameters.values()
    num_required = sum(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )
    if not parameters or num_required > 1 or _is_described(function):
        raise _no_list(getattr(function, "__name__", repr(function)))
    return function


def _is_described(function: Callable[..., Any]) -> bool:
    """Return whether hints and docstring make it a tool, whose first argument is no row."""
    try:
        properties = signature_of(function).schema["function"]["parameters"]["properties"]
    except Exception:  # no hints or no docstring: the parser of both raises many kinds
        return False
    return next(iter(properties.values()), {}).get("type") != "object"


def _no_list(name: str) -> ToolDefinitionError:
    return ToolDefinitionError(
        f"`tools` must be a list of tools, got the tool `{name}` itself. Write `[{name}]`."
    )


def tool_name(tool: Tool | Callable[..., Any]) -> str:
    """Return the name that the model uses, without the work of describing the tool."""
    return tool.name if isinstance(tool, Tool) else tool.__name__
