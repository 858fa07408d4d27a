"""Sample with vLLM in processes of its own, reached over HTTP.

Owns the engine that users see and the order of a weight update. `fleet.py` sends requests,
`handshake.py` checks servers, `weight_transfer.py` sends weights. Invariant: a request goes only to
servers that hold the weights of the last learner that the engine was given.
"""

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.engines.base import EngineStats, RolloutEngine
from agent_vllm.engines.gpu import finish_work, gpu_of
from agent_vllm.engines.learner import (
    LearnerWeights,
    check_against_learner,
    check_shapes,
    model_source,
)
from agent_vllm.engines.request import GenerationRequest
from agent_vllm.engines.server.address import server_url
from agent_vllm.engines.server.weight_transfer import (
    BACKENDS,
    UNFINISHED,
    ServerProcess,
    WeightTransfer,
    from_first_rank,
    is_first_rank,
    wait_for_all_ranks,
)
from agent_vllm.errors import EngineDeadError, EngineError, WeightSyncError
from agent_vllm.types import Completion

if TYPE_CHECKING:  # they load an HTTP client, which other engines do without
    from agent_vllm.engines.server.client import ClientThread
    from agent_vllm.engines.server.gate import InFlight
    from agent_vllm.engines.server.handshake import ServerFacts
    from agent_vllm.engines.server.members import Members, Server


class VLLMServerRolloutEngine(RolloutEngine):
    """Sample with one or more running `vllm serve` processes; `agent-vllm serve` starts one.

    All servers are checked before anything is sampled. Built from a model, the engine first sends
    them that model's weights. Requests of one trajectory stay on one server. If a server dies, its
    requests continue on another, and the next update that reaches it takes it back. With several
    learner processes, each builds an engine over the same servers; the first sends the weights.

    Weights are sent as the servers' `--weight-transfer-config` says: `trainer_memory` on this
    machine, `nccl` between GPUs (experimental: not run).

    Args:
        model: a causal language model, or a path or id; what the servers serve.
        tokenizer: its tokenizer; default is the one at the path.
        base_urls: the servers, such as `["http://127.0.0.1:8000"]`.
        in_flight: what an update does with requests in flight. `"continue"`: they are cut and
            continue with the new weights; `Completion.token_versions` says where. `"wait"`: the
            update waits for them.
        max_model_len: prompt and completion together; default is the servers'.
        request_timeout_s: for one turn, queueing in the server included.
        health_interval_s: seconds between two health checks of a server that has requests.
        seed: for requests without a seed.
        api_key: sent to every server as a bearer token; default is VLLM_API_KEY of the environment,
            where vLLM's servers look too. It is never shown.
        group_port: port of this machine where the servers' workers meet the learner for `nccl`;
            default is a free one.

    Raises:
        ValueError: an address, the key or a setting is invalid.
        VLLMServerError: a server can't be reached, has other settings, or differs from another.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        base_urls: Sequence[str] = (),
        in_flight: "InFlight" = "continue",
        max_model_len: int | None = None,
        request_timeout_s: float = 600.0,
        health_interval_s: float = 2.0,
        seed: int = 0,
        api_key: str | None = None,
        group_port: int | None = None,
    ) -> None:
        from agent_vllm.engines.server.client import ClientThread, ServerClient
        from agent_vllm.engines.server.fleet import Fleet

        _check_arguments(base_urls, in_flight)
        urls = _different([server_url(url) for url in base_urls])
        api_key = _checked_key(api_key or os.environ.get("VLLM_API_KEY") or None)
        self._source = model_source(model, tokenizer)
        self._in_flight: InFlight = in_flight
        self._is_checked = False
        self._transfer: WeightTransfer | None = None
        self._thread = ClientThread()
        try:
            clients = [
                ServerClient(
                    url, self._thread.session, vocab_size=self._source.vocab_size,
                    request_timeout_s=request_timeout_s, api_key=api_key,
                )
                for url in urls
            ]  # fmt: skip
            self._fleet = Fleet(
                clients, self._source.tokenizer, health_interval_s=health_interval_s
            )
            has_weights = not isinstance(model, str | Path)
            self._facts = self._thread.call(self._check_all(max_model_len, not has_weights))
            super().__init__(
                tokenizer=self._source.tokenizer,
                vocab_size=self._source.vocab_size,
                max_model_len=max_model_len or self._facts.max_model_len,
                eos_token_ids=self._source.eos_token_ids,
                seed=seed,
            )
            self._transfer = BACKENDS[self._facts.backend](group_port)
            self._fleet.members.label = None if has_weights else self._facts.weights_name
            self._thread.submit(self._fleet.members.watch())
            if not isinstance(model, str | Path):
                self._sync(model, version=0)
        except BaseException:
            self.close()
            raise

    # ---- requests ----

    async def _sample(self, request: GenerationRequest) -> Completion:
        future = self._thread.submit(self._fleet.sample(request))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise EngineDeadError("The engine is closed.") from None

    def forget(self, affinity: str) -> None:
        with suppress(EngineError):  # closed, so nothing is kept
            self._thread.submit(self._fleet.forget(affinity))

    def stats(self) -> EngineStats:
        return self._fleet.stats

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self._facts.dtype)

    def close(self) -> None:
        """Close the connections and the weight transfer. The servers keep running."""
        self._thread.close()
        if self._transfer is not None:
            self._transfer.close()

    # ---- weights ----

    def _load_weights(self, model: PreTrainedModel) -> None:
        self._sync(model, version=self.next_version)

    def _sync(self, model: PreTrainedModel, version: int) -> None:
        """Send the weights from the first learner process; all processes return together."""
        wait_for_all_ranks()  # one of them may still be asking the servers something
        finish_work(gpu_of(model))  # NCCL packs on streams of its own
        weights = LearnerWeights(model, dtype=self.dtype)
        check_shapes(self._source.shapes, weights.shapes)
        label = self._send_or_join(weights, version)
        if not is_first_rank():
            self._thread.call(self._fleet.gate.adopt(version, label))
        if not self._is_checked and not weights.is_sharded:
            check_against_learner(
                weights.model,
                self._sample_all,
                vocab_size=self.vocab_size,
                dtype=self.dtype,
                num_prompts=2 * len(self._fleet.members.servers),  # some for each of them
            )
            self._is_checked = True

    def _send_or_join(self, weights: LearnerWeights, version: int) -> str:
        """Return the label of the weights, which is the first process's.

        Raises:
            WeightSyncError, EngineDeadError: on every rank, if the first could not send.
        """
        label, error = f"{version}:{uuid.uuid4().hex}", None  # no other process sends this name
        if is_first_rank():
            try:
                self._send(weights, version, label)
            except Exception as caught:  # raised once the other processes know of it
                error = caught
        else:
            self._weight_transfer.join(weights)
        is_dead = isinstance(error, EngineDeadError)
        label, trouble, is_dead = from_first_rank((label, error and str(error), is_dead))
        if error is not None:
            raise error
        if trouble is not None:
            raised = EngineDeadError if is_dead else WeightSyncError
            raise raised(f"The first process could not send the weights: {trouble}")
        return label

    def _send(self, weights: LearnerWeights, version: int, label: str) -> None:
        call, members, gate = self._thread.call, self._fleet.members, self._fleet.gate
        try:
            with self._joined_if_it_fails(weights):
                call(gate.close(self._in_flight))
                call(members.take_back(self._check_again))
                call(members.each(lambda server: server.client.name_weights(UNFINISHED)))
            routes = _Routes(self._thread, members)
            self.num_synced_bytes = self._weight_transfer.send(weights, routes)
            call(members.each(lambda server: server.client.finish_update(label)))
            call(gate.reset_caches())
        except BaseException as error:
            call(gate.abandon(f"a weight update failed: {error}"))
            if isinstance(error, EngineError) and not isinstance(error, EngineDeadError):
                raise WeightSyncError(f"The weights did not reach the servers: {error}") from error
            raise
        call(gate.open(version, label))

    @property
    def _weight_transfer(self) -> WeightTransfer:
        assert self._transfer is not None
        return self._transfer

    @contextmanager
    def _joined_if_it_fails(self, weights: LearnerWeights) -> Iterator[None]:
        """Join the gathers if the block fails, as the other processes take part in them anyway."""
        try:
            yield
        except BaseException:
            self._weight_transfer.join(weights)
            raise

    def _sample_all(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        async def sample_all() -> list[Completion]:
            return await asyncio.gather(*map(self._fleet.sample, requests))

        return self._thread.call(sample_all())

    # ---- checks ----

    async def _check_all(self, max_model_len: int | None, weights_stay: bool) -> "ServerFacts":
        from agent_vllm.engines.server.handshake import check_agreement, check_server

        self._check = partial(check_server, source=self._source, max_model_len=max_model_len)
        servers = self._fleet.members.servers
        facts = await asyncio.gather(*(self._check(server.client) for server in servers))
        check_agreement(facts, weights_stay=weights_stay)
        for server, its_facts in zip(servers, facts, strict=True):
            server.num_workers = its_facts.num_workers
        return facts[0]

    async def _check_again(self, server: "Server") -> None:
        from agent_vllm.engines.server.handshake import check_agreement

        check_agreement([self._facts, await self._check(server.client)], weights_stay=False)


class _Routes:
    """Let `weight_transfer` call all servers from the learner's thread."""

    def __init__(self, thread: "ClientThread", members: "Members") -> None:
        self._thread = thread
        self._members = members

    def start(self) -> None:
        self._call(lambda server: server.client.start_update())

    def update(self, info: dict[str, Any]) -> None:
        self._call(lambda server: server.client.update(info))

    def init(self, info_of: Callable[[int], dict[str, Any]]) -> None:
        sizes = self._members.sizes()
        before = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        self._call(lambda server: server.client.init_transfer(info_of(before[server])))

    def sizes(self) -> dict[ServerProcess, int]:
        sizes = self._members.sizes()
        return {(str(server), server.incarnation): size for server, size in sizes.items()}

    def _call(self, call: "Callable[[Server], Awaitable[Any]]") -> None:
        self._thread.call(self._members.each(call))


def _check_arguments(base_urls: Sequence[str], in_flight: str) -> None:
    if isinstance(base_urls, str) or not base_urls:
        raise ValueError(
            "`base_urls` must be a list of the servers' addresses, such as "
            f'["http://127.0.0.1:8000"], got {base_urls!r}. `agent-vllm serve MODEL` starts one.'
        )
    if in_flight not in ("continue", "wait"):
        raise ValueError(f'`in_flight` must be "continue" or "wait", got {in_flight!r}.')


def _different(urls: list[str]) -> list[str]:
    if len(set(urls)) < len(urls):
        raise ValueError(f"`base_urls` must name each server once, got {urls}.")
    return urls


def _checked_key(key: str | None) -> str | None:
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ValueError(
            "`api_key` (or VLLM_API_KEY) must be one line of ASCII text, got other characters. "
            "Does it end with a line break?"
        )
    return key
