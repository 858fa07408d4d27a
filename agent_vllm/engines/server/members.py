"""Keep track of which servers of an engine are in use, and call all of them.

Everything here runs on the connections' event loop. Invariant: a server that is in holds the
weights named `label`, as far as anyone has looked.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from agent_vllm.engines.server.client import ServerClient
from agent_vllm.engines.server.http import KeyRefusedError, NoAnswerError, RefusedError
from agent_vllm.errors import EngineDeadError, EngineError, VLLMServerError

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Server:
    """Hold one server and what is known of it. It is in as long as `why_out` is None."""

    client: ServerClient
    num_workers: int = 1
    incarnation: int = 0  # counts how often it came back, perhaps as another process
    why_out: str | None = None
    is_reported: bool = False  # as out, since it last was in order
    seen_s: float = -math.inf  # when a look began that found the current weights
    tasks: set[asyncio.Task] = field(default_factory=set)  # one per request that it works on
    examining: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_in(self) -> bool:
        return self.why_out is None

    def __str__(self) -> str:
        return self.client.url


class Members:
    """Keep all servers of an engine. Those that are in get requests and weights.

    Args:
        health_interval_s: seconds between two health checks of a server that has requests.

    Attributes:
        label: name of the weights that the servers must hold; None while weights change.
    """

    def __init__(self, clients: Iterable[ServerClient], *, health_interval_s: float = 2.0) -> None:
        self.servers = [Server(client=client) for client in clients]
        self.label: str | None = None
        self._health_interval_s = health_interval_s
        self._logged: set[tuple[Server, type[Exception]]] = set()  # causes of failed looks

    @property
    def in_use(self) -> list[Server]:
        """Return the servers that are in."""
        return [server for server in self.servers if server.is_in]

    @property
    def tasks(self) -> list[asyncio.Task]:
        """Return one task per request on its way to any server."""
        return [task for server in self.servers for task in server.tasks]

    def sizes(self) -> dict[Server, int]:
        """Return the number of workers of each server that is in."""
        return {server: server.num_workers for server in self.in_use}

    def none_left(self) -> EngineDeadError:
        """Return the error that says why every server is out."""
        reasons = " ".join(f"{s}: {s.why_out}." for s in self.servers if not s.is_in)
        return EngineDeadError(f"No server is left. {reasons}")

    # ---- health ----

    async def watch(self) -> None:
        """Examine servers that have requests at intervals, until cancelled."""
        while True:
            await asyncio.sleep(self._health_interval_s)
            servers = [server for server in self.in_use if server.tasks]
            looks = [self.examine(server, time.monotonic()) for server in servers]
            results = await asyncio.gather(*looks, return_exceptions=True)
            for server, result in zip(servers, results, strict=True):
                if isinstance(result, Exception):
                    self._log_once(server, result)

    async def examine(self, server: Server, since_s: float, trouble: str = "") -> None:
        """Make sure that a look at the server which began after `since_s` found it in order.

        A server that doesn't answer, or that holds other weights, is taken out. Many callers share
        one look.

        Args:
            since_s: by `time.monotonic()`.
            trouble: what was noticed before; the reason if the server doesn't answer.

        Raises:
            EngineError: it answered with nonsense.
        """
        async with server.examining:
            if not server.is_in or self.label is None or server.seen_s >= since_s:
                return
            began_s = time.monotonic()
            try:
                name = await server.client.weights_name()
            except (NoAnswerError, RefusedError, KeyRefusedError) as error:
                self.take_out(server, trouble or str(error))
                return
            if self.label is None:
                return
            if name == self.label:
                server.seen_s, server.is_reported = began_s, False
                return
            self.take_out(
                server,
                f"its weights are {name!r}, not {self.label!r}: it was started again, or somebody "
                "else wrote to it. What it sampled since is dropped",
            )

    def _log_once(self, server: Server, error: Exception) -> None:
        cause = (server, type(error))
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning(
                "A look at %s failed; others that fail like it are not logged: %s: %s",
                server, type(error).__name__, error,
            )  # fmt: skip

    def take_out(self, server: Server, reason: str) -> None:
        """Stop using a server until an update reaches it; its requests go to other servers."""
        if not server.is_in:
            return
        level = logging.INFO if server.is_reported else logging.WARNING
        server.why_out, server.is_reported = reason, True
        logger.log(
            level,
            "%s is out, with %d requests: %s. The next weight update takes it back if it answers.",
            server, len(server.tasks), reason,
        )  # fmt: skip
        for task in server.tasks:
            task.cancel()

    async def take_back(self, check: Callable[[Server], Awaitable[object]]) -> None:
        """Before an update, take back servers that are out and answer again.

        Args:
            check: raises a `VLLMServerError` if the server must stay out.
        """
        for server in [server for server in self.servers if not server.is_in]:
            try:
                await check(server)
                await server.client.pause()
            except (VLLMServerError, EngineError) as error:
                logger.info("%s stays out: %s", server, error)
                continue
            logger.warning("%s is back.", server)
            server.why_out, server.is_reported = None, False
            server.incarnation += 1

    # ---- calls to all ----

    async def each(self, call: Callable[[Server], Awaitable[T]]) -> dict[Server, T]:
        """Call every server that is in; take out those that fail where another does not.

        Raises:
            EngineError: all of them answered, and none as it should; the first one's.
            EngineDeadError: no server is left.
        """
        servers = self.in_use
        results = await asyncio.gather(*map(call, servers), return_exceptions=True)
        answers: dict[Server, T] = {}
        failures: dict[Server, EngineError] = {}
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, EngineError):
                failures[server] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[server] = result
        refusals = [error for error in failures.values() if not isinstance(error, NoAnswerError)]
        if refusals and not answers:
            raise refusals[0]
        for server, error in failures.items():
            self.take_out(server, str(error))
        if not self.in_use:
            raise self.none_left()
        return answers

    async def each_that_can(self, call: Callable[[Server], Awaitable[object]]) -> None:
        """Call every server that is in; take out those that fail, even if none is left."""

        async def call_or_take_out(server: Server) -> None:
            try:
                await call(server)
            except EngineError as error:
                self.take_out(server, str(error))

        await asyncio.gather(*map(call_or_take_out, self.in_use))
