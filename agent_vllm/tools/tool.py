"""Tool: a function, what the model is told of it, and how it may be run.

Owns schemas and the check of arguments. Invariant: a tool that was built has a schema that can be
checked without asking anything outside of it.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
from referencing.jsonschema import DRAFT202012
from transformers.utils.chat_template_utils import get_json_schema

from agent_vllm.errors import ToolDefinitionError

_NOTHING_REMOTE = referencing.Registry()  # without it, jsonschema fetches remote references


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool:
    """A function that the model may call.

    Attributes:
        schema: what the chat template sees, `{"type": "function", "function": {"name",
            "description", "parameters"}}`, as `transformers.utils.get_json_schema` gives it.
        function: sync or async; gets the arguments by keyword.
        ends_episode: a call that succeeds is the trajectory's last act (a "final answer" tool).
        max_concurrency: calls of this tool that run at one time in a rollout, None for no limit.
        max_calls_per_s: how fast its calls may begin, None for no limit.
        max_retries: how often a call that raised or ran out of time is made again. Only for tools
            that are safe to call twice.
    """

    schema: Mapping[str, Any]
    function: Callable[..., Any]
    ends_episode: bool = False
    max_concurrency: int | None = None
    max_calls_per_s: float | None = None
    max_retries: int = 0

    def __post_init__(self) -> None:
        self._check_limits()
        try:
            problem = _problem_of(json.dumps(self._parameters))
        except (TypeError, ValueError) as error:
            problem = f"are no JSON: {error}"
        if problem is not None:
            raise ToolDefinitionError(f"The parameters of tool `{self.name}` {problem}.")

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @functools.cached_property
    def schema_text(self) -> str:
        """The schema as JSON; the same for tools that the model can't tell apart."""
        return json.dumps(dict(self.schema))

    @functools.cached_property
    def is_async(self) -> bool:
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an object's async __call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @functools.cached_property
    def _validator(self) -> jsonschema.Draft202012Validator:
        return jsonschema.Draft202012Validator(self._parameters, registry=_NOTHING_REMOTE)

    @functools.cached_property
    def _parameters(self) -> dict[str, Any]:
        parameters = self.schema["function"].get("parameters") or {}
        return {"type": "object", "additionalProperties": False, **parameters}

    def argument_errors(self, arguments: Mapping[str, Any]) -> list[str]:
        """What is wrong with the arguments, in the schema's terms; empty when they fit."""
        try:
            return [
                f"{'.'.join(map(str, error.absolute_path)) or 'arguments'}: {error.message}"
                for error in self._validator.iter_errors(arguments)
            ]
        except RecursionError:
            return ["arguments: nested too deeply"]

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


def as_tool(tool: Tool | Callable[..., Any]) -> Tool:
    """A `Tool` from a Python function with type hints and a Google-style docstring.

    Raises:
        ToolDefinitionError: the function can't be described to the model; says what is missing.
    """
    if isinstance(tool, Tool):
        return tool
    if not callable(tool):
        raise ToolDefinitionError(
            f"A tool must be a function or an `agent_vllm.tools.Tool`, got {tool!r}."
        )
    try:
        return Tool(schema=get_json_schema(tool), function=tool)
    except Exception as error:  # the parser of hints and docstrings raises many kinds
        name = getattr(tool, "__name__", repr(tool))
        raise ToolDefinitionError(
            f"Tool `{name}` can't be described to the model: {error} Give every argument a type "
            "hint, and the function a Google-style docstring with a line for each argument."
        ) from error


def tools_by_name(tools: Iterable[Tool | Callable[..., Any]] | None) -> dict[str, Tool]:
    """Tools in order, by the name the model uses.

    Raises:
        ToolDefinitionError: a tool that can't be described, or two of one name.
    """
    named: dict[str, Tool] = {}
    for tool in map(as_tool, tools or ()):
        if tool.name in named:
            raise ToolDefinitionError(
                f"Two tools are named `{tool.name}`. The model calls tools by name: rename one."
            )
        named[tool.name] = tool
    return named


def tool_name(tool: Tool | Callable[..., Any]) -> str:
    """The name that the model uses, without the work of describing the tool."""
    return tool.name if isinstance(tool, Tool) else tool.__name__


@functools.lru_cache(maxsize=4096)  # environments build the same tools over and over
def _problem_of(schema_text: str) -> str | None:
    schema = json.loads(schema_text)
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"are no JSON schema: {error.message}"
    resolver = _NOTHING_REMOTE.with_resource("", DRAFT202012.create_resource(schema)).resolver()
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except referencing.exceptions.Unresolvable:
            return (
                f"refer to {reference!r}, which is not in them. Write it out, or put it under "
                "`$defs`"
            )
    return None


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)
