"""Let requests out, except while weights change.

Runs on the connections' event loop. Invariant: while the gate is closed no request is on its way,
and while it is open every server that is in holds the weights of `version`.
"""

import asyncio
import math
import time
from typing import Literal

from agent_vllm.engines.server.members import Members
from agent_vllm.errors import WeightSyncError

InFlight = Literal["continue", "wait"]
_SETTLE_S = 30.0  # for requests to return from a paused server


class UpdateGate:
    """Stop requests around a weight update and keep the version that the servers hold.

    Attributes:
        version: the engine's policy version of the weights that the servers hold.
        is_open: set while requests may go out.
    """

    def __init__(self, members: Members) -> None:
        self.version = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._members = members

    async def close(self, in_flight: InFlight) -> None:
        """Stop new requests; wait for those in flight, or have them cut where they are."""
        members = self._members
        self.is_open.clear()
        if in_flight == "wait":
            while tasks := members.tasks:
                await asyncio.wait(tasks)
        await members.each_that_can(lambda server: server.client.pause())
        give_up_s = time.monotonic() + _SETTLE_S
        while tasks := members.tasks:
            await members.each_that_can(lambda server: server.client.abort_all())
            await asyncio.wait(tasks, timeout=0.1)
            if time.monotonic() > give_up_s:
                for task in members.tasks:
                    task.cancel()
        await self._last_look()

    async def reset_caches(self) -> None:
        """Drop everything that was computed with older weights.

        Raises:
            WeightSyncError: a server refused.
        """
        answers = await self._members.each(lambda server: server.client.reset_prefix_cache())
        for server, success in answers.items():
            if not success:
                raise WeightSyncError(
                    f"{server} refused to reset its prefix cache, so tokens would come from old "
                    "weights. Somebody else's requests are running there."
                )

    async def open(self, version: int, label: str) -> None:
        """Let requests out again, to the servers that hold the weights of that label."""
        self.version, self._members.label = version, label
        await self._members.each_that_can(lambda server: server.client.resume())
        self.is_open.set()

    async def abandon(self, reason: str) -> None:
        """Take all servers out until an update succeeds: nobody knows what weights they hold."""
        servers = self._members.in_use
        for server in servers:
            self._members.take_out(server, reason)
        await asyncio.gather(*(s.client.resume() for s in servers), return_exceptions=True)
        self.is_open.set()

    async def adopt(self, version: int, label: str) -> None:
        """Take over what another process sent: servers that hold these weights are in."""
        self.is_open.clear()
        self.version, self._members.label = version, label
        for server in self._members.servers:
            server.why_out, server.seen_s = None, -math.inf
        since_s, members = time.monotonic(), self._members
        await members.each_that_can(lambda server: members.examine(server, since_s))
        self.is_open.set()

    async def _last_look(self) -> None:
        """Take out the servers whose weights are no longer the ones that were sent to them.

        Whatever they sampled is dropped, and they count as started again.
        """
        since_s, members = time.monotonic(), self._members
        await members.each_that_can(lambda server: members.examine(server, since_s))
        members.label = None
