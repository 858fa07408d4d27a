"""Select the tools of a dataset row: all tools, or those that its `tools` column names."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.tools.tool import Tool


def select_tools(column: Any, tools: Mapping[str, Tool]) -> list[Tool]:
    """Return the row's tools.

    Args:
        column: the row's `tools` value: None for all tools, else a list of names or of JSON schemas
            (or such a list as a JSON string). A schema replaces the tool's own in the prompt; keys
            that Arrow filled with None are taken out.
        tools: the trainer's tools by name.

    Raises:
        ToolDefinitionError: a name that the trainer has no function for, or text that is no JSON.
    """
    if column is None:
        return list(tools.values())
    try:
        entries = json.loads(column) if isinstance(column, str) else column
    except ValueError as error:
        raise ToolDefinitionError(
            f"A row's `tools` column is no JSON: {error}. It was {column!r}."
        ) from error
    return [_tool_of(entry, tools) for entry in entries]


def _tool_of(entry: Any, tools: Mapping[str, Tool]) -> Tool:
    schema = _without_none(entry) if isinstance(entry, Mapping) else None
    name: Any = entry if schema is None else schema.get("function", {}).get("name")
    if name not in tools:
        raise ToolDefinitionError(
            f"A row's `tools` column names {name!r}, for which the trainer has no function. Its "
            f"tools are: {', '.join(tools) or 'none'}."
        )
    tool = tools[name]
    if schema is None:
        return tool
    return dataclasses.replace(tool, schema=schema)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
