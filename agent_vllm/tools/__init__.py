"""Tools: what the model may call, and the running of its calls.

`tool` describes them; `selection` picks those of a dataset row; `runner` runs calls (`threads` the sync functions, `loops` the async ones,
`isolation` those that get a process each); `mcp` brings a server's; `results` writes what comes
back as text. Knows nothing of chats, tokens or engines.
"""

from agent_vllm.tools.isolation import isolated
from agent_vllm.tools.mcp import McpTools
from agent_vllm.tools.results import ToolFailure, ToolInterrupted, encode_result
from agent_vllm.tools.runner import ToolRunner
from agent_vllm.tools.selection import select_tools
from agent_vllm.tools.tool import Tool, as_tool, tool_name, tools_by_name

__all__ = [
    "McpTools",
    "Tool",
    "ToolFailure",
    "ToolInterrupted",
    "ToolRunner",
    "as_tool",
    "encode_result",
    "isolated",
    "select_tools",
    "tool_name",
    "tools_by_name",
]
