"""A small MCP server: `python mcp_server.py [port]`, over HTTP with a port, else over stdio."""

import asyncio
import base64
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, ImageContent, TextContent

server = MCPServer("test", log_level="ERROR")
arrived = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
async def meet(num_guests: int) -> str:
    """Returns once so many calls have come."""
    global arrived
    arrived += 1
    while arrived < num_guests:
        await asyncio.sleep(0.01)
    return "met"


@server.tool()
async def wait() -> str:
    """Never returns."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("out of stock")


@server.tool()
def two_texts() -> CallToolResult:
    """Two blocks of text."""
    blocks = [TextContent(type="text", text=text) for text in ("one", "zwei é")]
    return CallToolResult(content=blocks)


@server.tool()
def structured() -> CallToolResult:
    """Structured content alone."""
    return CallToolResult(content=[], structuredContent={"n": 1, "é": [True, None]})


@server.tool()
def picture() -> CallToolResult:
    """An image."""
    data = base64.b64encode(b"png").decode()
    return CallToolResult(content=[ImageContent(type="image", data=data, mimeType="image/png")])


@server.tool()
def environment() -> str:
    """The names of its environment variables."""
    return " ".join(sorted(os.environ))


@server.tool()
def pid() -> str:
    """Its process."""
    return str(os.getpid())


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
