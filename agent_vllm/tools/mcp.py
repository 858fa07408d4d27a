"""Offer the tools of an MCP server as `Tool`s.

Owns the session (one thread, one event loop, one server) and the text of its results. The official
client speaks the protocol. Invariant: a server that was started is stopped, whatever happens.
"""

import asyncio
import atexit
import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, overload

from agent_vllm.errors import ToolServerError
from agent_vllm.tools.results import ToolFailure, encode_result
from agent_vllm.tools.tool import Tool, tools_by_name

if TYPE_CHECKING:
    from mcp import Client

_LOG_CHARS = 2000
_LINE_CHARS = 200
_MAX_PAGES = 100
_ANSWER_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0  # between attempts to reach a lost server


class McpTools(Sequence[Tool]):
    """Offer the tools of one server, in its order. `close`, `with` or Python's exit ends it.

    ```python
    with McpTools(command=["npx", "-y", "@modelcontextprotocol/server-memory"]) as tools:
        rollout_batch(engine, chat, messages_batch, [tools] * len(messages_batch))
    ```

    Calls run concurrently over one session. Text content is returned as text, and structured
    content alone as JSON. Images and other binary data give a failed result, and so does a result
    that the server marks as an error.

    If the server ends, calls in flight fail. The next call starts it again, or reaches the one that
    was started in its place; attempts that fail are at most one per second, later one per minute.

    Args:
        command: a program and its arguments; it serves over stdin and stdout. It gets the few
            environment variables that the official client considers safe, and `environment`.
        url: address of a server that speaks streamable HTTP.
        environment: further environment variables for the command.
        headers: sent with every HTTP request, for instance `Authorization`.
        timeout_s: seconds in which the server must start and list its tools.

    Raises:
        ToolServerError: the server can't be started or reached, exits, does not speak MCP or does
            not answer in time; or the package `mcp` is missing.
        ToolDefinitionError: two of its tools have one name, or a schema is not a JSON schema.
        ValueError: neither or both of `command` and `url` are given.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        environment: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if (command is None) == (url is None) or isinstance(command, str):
            raise ValueError(
                f"Give either `command` (a list) or `url`, got command={command!r} and url={url!r}."
            )
        self._connection = _Connection(
            lambda: _Session(command or [], url, environment or {}, headers or {}, timeout_s)
        )
        try:
            named = tools_by_name(map(self._tool, self._connection.start()))
        except BaseException:
            self._connection.close()
            raise
        self._tools = list(named.values())

    def close(self) -> None:
        """End the session and the server that it started. Can be called twice."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._tools)

    @overload
    def __getitem__(self, index: int) -> Tool: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tool]: ...
    def __getitem__(self, index: int | slice) -> Tool | list[Tool]:
        return self._tools[index]

    def _tool(self, described: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            return _text(await self._connection.call(described.name, arguments))

        function = {
            "name": described.name,
            "description": described.description or described.title or "",
            "parameters": described.input_schema,
        }
        return Tool(schema={"type": "function", "function": function}, function=call)


class _Connection:
    """Hold the session with the server, and replace it once it is lost."""

    def __init__(self, new_session: "Callable[[], _Session]") -> None:
        self._new_session = new_session
        self._session = new_session()
        self._replacing = threading.Lock()
        self._is_doubtful = False  # a call raised: the session may be lost
        self._is_closed = False
        self._pause_s = _FIRST_PAUSE_S
        self._next_attempt = 0.0

    def start(self) -> list[Any]:
        """Start the first session and return the server's descriptions of its tools."""
        return self._session.start()

    def close(self) -> None:
        with self._replacing:
            self._is_closed = True
            self._session.close()

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._is_doubtful:
            await asyncio.to_thread(self._ensure_session)
        session = self._session
        try:
            return await session.call(name, arguments)
        except ToolFailure:
            raise
        except Exception:
            if session is self._session:  # no other call has replaced it meanwhile
                self._is_doubtful = True
            raise

    def _ensure_session(self) -> None:
        """Replace the session if its server does not answer.

        Raises:
            ToolFailure: the server can't be reached now.
        """
        with self._replacing:
            if self._is_closed or not self._is_doubtful:
                return
            if not self._session.answers():
                self._replace()
            self._is_doubtful = False

    def _replace(self) -> None:
        wait_s = self._next_attempt - time.monotonic()
        if wait_s > 0:
            raise ToolFailure(f"The tool's server is gone; next attempt in {wait_s:.0f} s.")
        self._session.close()
        session = self._new_session()
        try:
            session.start()
        except ToolServerError as error:
            session.close()
            self._next_attempt = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            raise ToolFailure(f"The tool's server is gone. {error}") from error
        self._session, self._pause_s = session, _FIRST_PAUSE_S


class _Session:
    """Run the client on a thread of its own; it must end in the task in which it began."""

    def __init__(
        self,
        command: Sequence[str],
        url: str | None,
        environment: Mapping[str, str],
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._command, self._url = list(command), url
        self._environment, self._headers = dict(environment), dict(headers)
        self._timeout_s = timeout_s
        self._started: Future[list[Any]] = Future()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._garbage = ""
        self._client: Client | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="MCP session")

    def start(self) -> list[Any]:
        """Start the thread and return the server's descriptions of its tools."""
        atexit.register(self.close)
        self._thread.start()
        return self._started.result()

    def close(self) -> None:
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        client = self._client
        if client is None:
            raise ToolFailure("The session with the tool's server has ended.")
        call = client.call_tool(name, arguments)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def answers(self) -> bool:
        """Return whether the server lists its tools; called from other threads than the loop's."""
        client = self._client
        if client is None:
            return False
        listing = client.list_tools(cache_mode="bypass")
        answer = asyncio.run_coroutine_threadsafe(listing, self._loop)
        try:
            answer.result(_ANSWER_S)
        except Exception:  # whatever the transport raises
            answer.cancel()
            return False
        return True

    def _run(self) -> None:
        with (
            tempfile.TemporaryFile("w+") as log,
            asyncio.Runner(loop_factory=lambda: self._loop) as runner,
        ):
            try:
                runner.run(self._serve(log))
            except BaseException as error:
                if not self._started.done():
                    self._started.set_exception(self._explained(error, log))
            finally:
                self._client = None

    async def _serve(self, log: Any) -> None:
        async with asyncio.timeout(self._timeout_s) as limit, contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(await self._connect(log, stack))
            listed = await _list(client)
            limit.reschedule(None)
            self._client = client
            self._started.set_result(listed)
            await self._end.wait()

    async def _connect(self, log: Any, stack: contextlib.AsyncExitStack) -> "Client":
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        if self._url is None:
            program, *arguments = self._command
            server = StdioServerParameters(command=program, args=arguments, env=self._environment)
            transport = stdio_client(server, errlog=log)
        else:
            http = await stack.enter_async_context(create_mcp_http_client(headers=self._headers))
            transport = streamable_http_client(self._url, http_client=http)
        return Client(transport, message_handler=self._note_garbage)

    async def _note_garbage(self, message: Any) -> None:
        from pydantic import ValidationError

        if isinstance(message, Exception):
            said = message.errors()[0]["input"] if isinstance(message, ValidationError) else message
            self._garbage = f" What it said is no MCP: {str(said)[:_LINE_CHARS]!r}."

    def _explained(self, error: BaseException, log: Any) -> ToolServerError:
        if isinstance(error, ImportError):
            return ToolServerError(f"{error}. Run: pip install 'agent-vllm[mcp]'")
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        problem = (
            f"did not answer in {self._timeout_s:g} s"
            if isinstance(error, TimeoutError | asyncio.CancelledError)
            else f"failed: {type(error).__name__}: {_first_line(error)}"
        )
        end = _end_of(log)
        said = f" The end of its stderr:\n{end}" if end else ""
        where = self._url or " ".join(self._command)
        return ToolServerError(f"The MCP server `{where}` {problem}.{self._garbage}{said}")


async def _list(client: "Client") -> list[Any]:
    found, cursor = [], None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ValueError(f"its list of tools has more than {_MAX_PAGES} pages")


def _text(result: Any) -> str:
    """Return a `CallToolResult` as text for the model.

    Raises:
        ToolFailure: the server marked it as an error, or it holds what isn't text.
    """
    text = "\n".join(map(_block_text, result.content))
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise ToolFailure(encode_result(text or "The server gave no reason."))
    return text


def _block_text(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return f"{block.name}: {block.uri}"
    if block.type == "resource" and hasattr(block.resource, "text"):
        return block.resource.text
    raise ToolFailure(f"The result holds {block.type} data, but only text can be shown.")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _end_of(log: Any) -> str:
    size = os.fstat(log.fileno()).st_size
    log.seek(max(size - _LOG_CHARS, 0))
    return log.read().strip()
