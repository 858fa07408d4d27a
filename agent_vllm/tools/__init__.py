"""Tools: what the model may call, and the running of its calls.

`tool` describes them, `runner` runs calls (`threads`: sync functions, `loops`: async ones),
`results` writes what comes back as text. Knows nothing of chats, tokens or engines.
"""

from agent_vllm.tools.results import ToolInterrupted, encode_result
from agent_vllm.tools.runner import ToolRunner
from agent_vllm.tools.tool import Tool, as_tool, tools_by_name

__all__ = [
    "Tool",
    "ToolInterrupted",
    "ToolRunner",
    "as_tool",
    "encode_result",
    "tools_by_name",
]
