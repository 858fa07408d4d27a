"""Describe tools to the model and run its calls.

`tool` describes them, `selection` picks those of a dataset row, `runner` runs calls on `workers`
(threads and event loops), `isolation` runs each call in a process of its own, `interpreter` runs
Python code there, `mcp` connects to a server's tools, `results` encodes what comes back as text.
Knows nothing of chats, tokens or engines.
"""

from agent_vllm.tools.files import tools_in_file
from agent_vllm.tools.interpreter import PythonInterpreter
from agent_vllm.tools.isolation import isolated
from agent_vllm.tools.mcp import McpTools
from agent_vllm.tools.results import (
    MAX_RESULT_CHARS,
    ToolFailure,
    ToolInterrupted,
    encode_result,
    failure,
)
from agent_vllm.tools.runner import ToolRunner
from agent_vllm.tools.selection import select_tools
from agent_vllm.tools.tool import Tool, as_tool, row_function, tool_name, tools_by_name
from agent_vllm.tools.workers import Worker, call_in_thread, shared_loop

__all__ = [
    "MAX_RESULT_CHARS",
    "McpTools",
    "PythonInterpreter",
    "Tool",
    "ToolFailure",
    "ToolInterrupted",
    "ToolRunner",
    "Worker",
    "as_tool",
    "call_in_thread",
    "encode_result",
    "failure",
    "isolated",
    "row_function",
    "select_tools",
    "shared_loop",
    "tool_name",
    "tools_by_name",
    "tools_in_file",
]
