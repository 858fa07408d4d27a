"""Tools by their schema and calls of them, for the tests of tools."""

import asyncio
import json

from agent_vllm.tools import Tool, ToolRunner, tools_by_name
from agent_vllm.types import ToolCall


def schema(name, **properties):
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


def tool(function, name="f", **properties):
    """A tool by its schema, for functions without a docstring."""
    return Tool(schema=schema(name, **properties), function=function)


def ask(name="f", **arguments):
    return ToolCall(name=name, arguments=arguments)


def run(calls, tools, timeout_s=5.0, **options):
    """Results as (status, content), in call order."""

    async def work():
        runner = ToolRunner(timeout_s=timeout_s, **options)
        return await runner.run(calls, tools_by_name(tools))

    return [(result.status, result.content) for result in asyncio.run(work())]


def run_one(function, timeout_s=5.0):
    return run([ask()], [tool(function)], timeout_s)[0]


def failed(message):
    return ("failed", json.dumps({"error": message}))
