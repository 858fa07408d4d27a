"""Use several servers as one engine: choose a server per request, and retry what fails.

Runs on the connections' event loop. Invariant: a request is answered once, whatever its servers do,
and only with tokens of a server that was seen, after it answered, to hold the engine's weights.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from agent_vllm.engines.base import EngineStats
from agent_vllm.engines.request import GenerationRequest, ends_on_string
from agent_vllm.engines.server.client import Answer, ServerClient
from agent_vllm.engines.server.gate import UpdateGate
from agent_vllm.engines.server.http import NoAnswerError, RefusedError
from agent_vllm.engines.server.members import Members, Server
from agent_vllm.errors import EngineError
from agent_vllm.types import Completion

logger = logging.getLogger(__name__)


class Fleet:
    """Send each request to a server, and again to another if it fails.

    Args:
        max_attempts: how often one request may fail before it is given up.
        health_interval_s: seconds between two health checks of a server that has requests.

    Attributes:
        members: the servers, and which of them are in.
        gate: when requests may go out, and the version of the weights.
    """

    def __init__(
        self,
        clients: Iterable[ServerClient],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_attempts: int = 3,
        health_interval_s: float = 2.0,
    ) -> None:
        self.members = Members(clients, health_interval_s=health_interval_s)
        self.gate = UpdateGate(self.members)
        self.stats = EngineStats()
        self._tokenizer = tokenizer
        self._max_attempts = max_attempts
        self._homes: dict[str | _Sampled, Server] = {}  # by trajectory, or request without one

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
        """Forget which server a trajectory was on."""
        self._homes.pop(affinity, None)

    async def _sample(self, sampled: "_Sampled") -> Completion:
        failures: list[str] = []
        while len(failures) < self._max_attempts:
            await self.gate.is_open.wait()
            server = self._home_of(sampled)
            version = self.gate.version
            try:
                answer = await self._ask(server, sampled.rest())
                if answer.token_ids:
                    await self._confirm(server)
            except EngineError as error:
                failures.append(str(error))
                await self._after_failure(server, error)
                continue
            self._count(answer)
            sampled.add(answer, version)
            if sampled.finish_reason is not None:
                return sampled.completion()
            if self.gate.is_open.is_set() and version == self.gate.version:
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
            if server.is_in:  # cut off by the gate before it began
                return Answer(
                    token_ids=[], logprobs=[], finish_reason="abort", num_prompt_tokens=0,
                    num_cached_tokens=0,
                )  # fmt: skip
            raise NoAnswerError(f"{server} is out: {server.why_out}") from None
        finally:
            server.tasks.discard(task)

    async def _confirm(self, server: Server) -> None:
        """Make sure that the server still held the current weights after it answered.

        Raises:
            NoAnswerError: it did not, so what it sampled can't be used.
        """
        since_s = time.monotonic()
        await self.members.examine(server, since_s)
        if not server.is_in or server.seen_s < since_s:
            raise NoAnswerError(f"{server} is out: {server.why_out or 'its weights are changing'}")

    async def _after_failure(self, server: Server, error: EngineError) -> None:
        """Raise what another attempt can't fix; find out whether the server is still there."""
        if isinstance(error, RefusedError) and error.status < 500:
            raise error
        if not isinstance(error, NoAnswerError | RefusedError):
            raise error  # it answered, with nonsense
        await self.members.examine(server, time.monotonic(), str(error))
        if server.is_in and isinstance(error.__cause__, TimeoutError):
            raise EngineError(
                f"{error} The server is there and says that it is well: it is overloaded, or the "
                "turn is too long for `request_timeout_s`."
            ) from error

    def _home_of(self, sampled: "_Sampled") -> Server:
        """Return the server of the request's trajectory; a new one gets the emptiest server."""
        affinity = sampled.request.affinity
        key = sampled if affinity is None else affinity
        home = self._homes.get(key)
        if home is not None and home.is_in:
            return home
        homes = Counter(self._homes.values())
        candidates = self.members.in_use
        if not candidates:
            raise self.members.none_left()
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


class _Sampled:
    """Hold what one request has sampled so far; each answer adds tokens of one version."""

    def __init__(self, request: GenerationRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._tokenizer = tokenizer

    def rest(self) -> GenerationRequest:
        """Return the request for what is left, with a new seed if sampling goes on."""
        if not self.token_ids:
            return self.request
        return replace(
            self.request,
            prompt_ids=self.request.prompt_ids + self.token_ids,
            max_new_tokens=self.request.max_new_tokens - len(self.token_ids),
            seed=(self.request.seed + len(self.token_ids)) % 2**31,
        )

    def add(self, answer: Answer, version: int) -> None:
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
        if answer.finish_reason != "abort":
            self.finish_reason = answer.finish_reason

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
