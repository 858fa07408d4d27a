"""Several servers as one engine: who gets which request, who is in, and when weights may change.

Everything here runs on the one event loop of the connections. Invariants: a request is answered
once, whatever its servers do; a server that is in holds the weights of `label`; while weights
change no request is on its way.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from agent_vllm.engines.base import EngineStats, GenerationRequest, ends_on_string
from agent_vllm.engines.servers.client import Answer, NoAnswerError, RefusedError, ServerClient
from agent_vllm.errors import EngineDeadError, EngineError, VLLMServerError, WeightSyncError
from agent_vllm.types import Completion

logger = logging.getLogger(__name__)
T = TypeVar("T")

InFlight = Literal["continue", "wait"]
_FRESH_S = 0.01  # a look at a server is not asked for again in this time
_SETTLE_S = 30.0  # for requests to come back from a paused server


@dataclass(eq=False, kw_only=True)
class Server:
    """A server as the fleet sees it. `why_out` is None as long as it is in."""

    client: ServerClient
    num_workers: int = 1
    why_out: str | None = None
    last_trouble: str | None = None  # since it last answered well
    seen_s: float = -math.inf  # when it was last known to hold the current weights
    tasks: set[asyncio.Task] = field(default_factory=set)  # one a request that it works on
    examining: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_in(self) -> bool:
        return self.why_out is None

    def __str__(self) -> str:
        return self.client.url


class Fleet:
    """Sends each request to one of the servers, and again to another if need be.

    Args:
        max_attempts: how often one request may fail before it is given up.
        health_interval_s: seconds between two looks at each server.

    Attributes:
        version: the engine's policy version, of what the servers that are in hold.
        label: what those servers call their weights.
    """

    def __init__(
        self,
        clients: Iterable[ServerClient],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_attempts: int = 3,
        health_interval_s: float = 2.0,
    ) -> None:
        self.servers = [Server(client=client) for client in clients]
        self.version = 0
        self.label = ""
        self.stats = EngineStats()
        self._tokenizer = tokenizer
        self._max_attempts = max_attempts
        self._health_interval_s = health_interval_s
        self._homes: dict[str | _Sampled, Server] = {}  # by trajectory, or request without one
        self._is_open = asyncio.Event()
        self._is_open.set()

    # ---- one request ----

    async def sample(self, request: GenerationRequest) -> Completion:
        """Sample one sequence, over as many servers and updates as it takes.

        Raises:
            EngineDeadError: no server is left.
            EngineError: it failed too often.
        """
        sampled = _Sampled(request, self._tokenizer)
        try:
            return await self._sample(sampled)
        finally:
            if request.affinity is None:
                self._homes.pop(sampled, None)

    async def forget(self, affinity: str) -> None:
        """Let a trajectory's home be somebody else's."""
        self._homes.pop(affinity, None)

    async def _sample(self, sampled: "_Sampled") -> Completion:
        failures: list[str] = []
        while len(failures) < self._max_attempts:
            await self._is_open.wait()
            server = self._home_of(sampled)
            if self._is_stale(server):
                await self._examine(server)
                continue
            version = self.version
            try:
                answer = await self._ask(server, sampled.rest())
            except EngineError as error:
                failures.append(str(error))
                await self._after_failure(server, error)
                continue
            self._count(answer)
            sampled.add(answer, version)
            if sampled.finish_reason is not None:
                return sampled.completion()
            if self._is_open.is_set() and version == self.version:
                failures.append(f"{server} cut the request off; somebody else paused it.")
        raise EngineError(
            f"The request failed {len(failures)} times, the last time: {failures[-1]}"
        )

    async def _ask(self, server: Server, request: GenerationRequest) -> Answer:
        task = asyncio.ensure_future(server.client.generate(request))
        server.tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            if server.is_in:  # cut off by `hold`: it never began
                return Answer(
                    token_ids=[], logprobs=[], finish_reason="abort", num_prompt_tokens=0,
                    num_cached_tokens=0,
                )  # fmt: skip
            raise NoAnswerError(f"{server} is out: {server.why_out}") from None
        finally:
            server.tasks.discard(task)

    async def _after_failure(self, server: Server, error: EngineError) -> None:
        """Raise what another attempt can't mend; find out whether the server is still there."""
        if isinstance(error, RefusedError) and error.status < 500:
            raise error
        if not isinstance(error, NoAnswerError | RefusedError):
            raise error  # it answered, with nonsense
        await self._examine(server, str(error))
        if server.is_in and isinstance(error.__cause__, TimeoutError):
            raise EngineError(
                f"{error} The server is there and says that it is well: it is overloaded, or the "
                "turn is too long for `request_timeout_s`."
            ) from error

    def _home_of(self, sampled: "_Sampled") -> Server:
        """Where the request's trajectory lives; one that has no home gets the emptiest server."""
        affinity = sampled.request.affinity
        key = sampled if affinity is None else affinity
        home = self._homes.get(key)
        if home is not None and home.is_in:
            return home
        homes = Counter(self._homes.values())
        candidates = [server for server in self.servers if server.is_in]
        if not candidates:
            raise EngineDeadError(f"No server is left. {self._why_out()}")
        chosen = min(candidates, key=lambda server: homes[server])
        if home is not None:
            logger.warning(
                "%s moves from %s to %s (%d tokens of its turn are kept).",
                affinity or "A request", home, chosen, len(sampled.token_ids),
            )  # fmt: skip
        self._homes[key] = chosen
        return chosen

    def _count(self, answer: Answer) -> None:
        self.stats = replace(
            self.stats,
            num_prompt_tokens=self.stats.num_prompt_tokens + answer.num_prompt_tokens,
            num_cached_tokens=self.stats.num_cached_tokens + answer.num_cached_tokens,
        )

    # ---- who is in ----

    async def watch(self) -> None:
        """Look at every server that has requests now and then, until this is cancelled."""
        while True:
            await asyncio.sleep(self._health_interval_s)
            busy = [server for server in self._members() if server.tasks]
            await asyncio.gather(*map(self._examine, busy))

    def _is_stale(self, server: Server) -> bool:
        """Whether it may have been started again since somebody looked."""
        return time.monotonic() - server.seen_s > max(self._health_interval_s, _FRESH_S)

    async def _examine(self, server: Server, trouble: str = "") -> None:
        """Take a server out that is gone, or that came back with other weights."""
        async with server.examining:
            if not server.is_in or not self._is_open.is_set():
                return
            if not trouble and not self._is_stale(server):
                return  # somebody else just looked
            try:
                label = await server.client.weight_version()
            except EngineError as error:
                self.take_out(server, trouble or str(error))
                return
            server.seen_s, server.last_trouble = time.monotonic(), None
            if label != self.label and self._is_open.is_set():
                self.take_out(
                    server,
                    f"its weights are {label!r}, not {self.label!r}: it was started again, or "
                    "somebody else wrote to it",
                )

    def take_out(self, server: Server, reason: str) -> None:
        """Ask it for nothing more until an update has reached it; its requests go elsewhere."""
        if not server.is_in:
            return
        level = logging.INFO if reason == server.last_trouble else logging.WARNING
        server.why_out = server.last_trouble = reason
        logger.log(
            level,
            "%s is out, with %d requests: %s. The next weight update takes it back if it answers.",
            server, len(server.tasks), reason,
        )  # fmt: skip
        for task in server.tasks:
            task.cancel()

    async def take_back(self, check: Callable[[Server], Awaitable[object]]) -> None:
        """Before weights are sent: servers that are out and answer again get them too.

        Args:
            check: raises a `VLLMServerError` where the server must stay out.
        """
        for server in [server for server in self.servers if not server.is_in]:
            try:
                await check(server)
                await server.client.pause()
            except (VLLMServerError, EngineError) as error:
                logger.info("%s stays out: %s", server, error)
                continue
            logger.warning("%s is back.", server)
            server.why_out = None

    def sizes(self) -> dict[Server, int]:
        """Workers of each server that is in."""
        return {server: server.num_workers for server in self._members()}

    def _members(self) -> list[Server]:
        return [server for server in self.servers if server.is_in]

    def _why_out(self) -> str:
        return " ".join(f"{s}: {s.why_out}." for s in self.servers if not s.is_in)

    async def each(self, call: Callable[[Server], Awaitable[T]]) -> dict[Server, T]:
        """Call all servers that are in; one that doesn't answer is out.

        Raises:
            RefusedError: one of them refused.
            EngineDeadError: none is left.
        """
        members = self._members()
        results = await asyncio.gather(*map(call, members), return_exceptions=True)
        for server, result in zip(members, results, strict=True):
            if isinstance(result, NoAnswerError):
                self.take_out(server, str(result))
        errors = [r for r in results if isinstance(r, BaseException)]
        for error in errors:
            if not isinstance(error, NoAnswerError):
                raise error
        if not self._members():
            raise EngineDeadError(f"No server is left. {self._why_out()}")
        answered = zip(members, results, strict=True)
        return {s: r for s, r in answered if not isinstance(r, BaseException)}

    async def _tell(self, call: Callable[[Server], Awaitable[object]]) -> None:
        """Call all servers that are in; one that fails is out, and there may be none."""

        async def tell(server: Server) -> None:
            try:
                await call(server)
            except EngineError as error:
                self.take_out(server, str(error))

        await asyncio.gather(*map(tell, self._members()))

    # ---- around an update ----

    async def hold(self, in_flight: InFlight) -> None:
        """Let no request be on its way: wait for them, or have them cut where they are."""
        self._is_open.clear()
        if in_flight == "wait":
            while tasks := self._tasks():
                await asyncio.wait(tasks)
        await self._tell(lambda server: server.client.pause())
        give_up_s = time.monotonic() + _SETTLE_S
        while tasks := self._tasks():
            await self._tell(lambda server: server.client.abort_all())
            await asyncio.wait(tasks, timeout=0.1)
            if time.monotonic() > give_up_s:
                for task in self._tasks():
                    task.cancel()

    async def reset_caches(self) -> None:
        """Drop what was computed with older weights.

        Raises:
            WeightSyncError: a server refused.
        """
        for server, success in (await self.each(lambda s: s.client.reset_prefix_cache())).items():
            if not success:
                raise WeightSyncError(
                    f"{server} refused to reset its prefix cache, so tokens would come from old "
                    "weights. Somebody else's requests are running there."
                )

    async def go_on(self, version: int, label: str) -> None:
        """Requests may go out again, to servers that hold the weights of that label."""
        self.version, self.label = version, label
        await self._tell(lambda server: server.client.resume())
        for server in self._members():
            server.seen_s = time.monotonic()
        self._is_open.set()

    async def abandon(self, reason: str) -> None:
        """Nobody knows what weights the servers hold: all are out until an update succeeds."""
        members = self._members()
        for server in members:
            self.take_out(server, reason)
        await asyncio.gather(*(s.client.resume() for s in members), return_exceptions=True)
        self._is_open.set()

    async def adopt(self, version: int, label: str) -> None:
        """Another process sent the weights; who holds them is in."""
        self._is_open.clear()
        self.version, self.label = version, label
        for server in self.servers:
            server.why_out, server.seen_s = None, -math.inf
        self._is_open.set()
        await asyncio.gather(*map(self._examine, self.servers))

    def _tasks(self) -> list[asyncio.Task]:
        return [task for server in self.servers for task in server.tasks]


class _Sampled:
    """What has been sampled of one request so far; each answer adds a stretch of one version."""

    def __init__(self, request: GenerationRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._tokenizer = tokenizer

    def rest(self) -> GenerationRequest:
        """What is still to be sampled. Where it goes on, with a seed of its own: the draws so far
        are spent."""
        if not self.token_ids:
            return self.request
        return replace(
            self.request,
            prompt_ids=self.request.prompt_ids + self.token_ids,
            max_new_tokens=self.request.max_new_tokens - len(self.token_ids),
            seed=(self.request.seed + len(self.token_ids)) % 2**31,
        )

    def add(self, answer: Answer, version: int) -> None:
        if len(answer.token_ids) != len(answer.logprobs):
            raise EngineError(
                f"The server sent {len(answer.token_ids)} tokens with {len(answer.logprobs)} "
                "logprobs; the completion is dropped."
            )
        goes_on = bool(self.token_ids)
        for token_id, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.versions.append(version)
            # a stop string that an update cut in two is seen by no server
            strings = self.request.sampling.stop_strings if goes_on else ()
            if ends_on_string(self._tokenizer, self.token_ids, strings):
                self.finish_reason = "stop"
                return
        if answer.finish_reason in ("stop", "length"):
            self.finish_reason = answer.finish_reason
        elif answer.finish_reason != "abort":
            raise EngineError(f"The server ended a request with {answer.finish_reason!r}.")

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        versions = self.versions
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            policy_version=versions[0] if versions else 0,
            token_versions=versions if len(set(versions)) > 1 else None,
        )
