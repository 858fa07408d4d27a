"""VLLMServerRolloutEngine: vLLM in processes of its own, reached over HTTP.

Owns the engine that users see and the order of a weight update. `servers/fleet.py` sends requests,
`checks.py` says what a server must be, `weight_transfer.py` moves weights. Invariant: a
request goes only to servers that hold the weights of the last learner the engine was given.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.engines.base import EngineStats, GenerationRequest, RolloutEngine
from agent_vllm.engines.learner.sharding import is_sharded
from agent_vllm.engines.models import model_source
from agent_vllm.engines.self_check import check_against_learner
from agent_vllm.engines.servers.weight_transfer import (
    BACKENDS,
    UNFINISHED,
    from_first_rank,
    is_first_rank,
    wait_for_all_ranks,
)
from agent_vllm.engines.weight_sync import check_weights, plain_model, weight_shapes
from agent_vllm.errors import EngineDeadError, EngineError, WeightSyncError
from agent_vllm.types import Completion

if TYPE_CHECKING:  # they load an HTTP client, which other engines do without
    from agent_vllm.engines.servers.checks import ServerFacts
    from agent_vllm.engines.servers.client import ClientThread
    from agent_vllm.engines.servers.fleet import Fleet, InFlight, Server


class VLLMServerRolloutEngine(RolloutEngine):
    """Samples with one or more running `vllm serve` processes; `agent-vllm serve` starts one.

    All servers are checked before anything is sampled. Built from a model, the engine first sends
    them that model's weights. Requests of one trajectory stay on one server; those of a server that
    dies go on elsewhere, and it is taken back by the first update that reaches it. With several
    learner processes each builds an engine over the same servers; the first sends the weights.

    Weights are sent as the servers' `--weight-transfer-config` says: `trainer_memory` on this
    machine, `nccl` between GPUs. The latter has not been run.

    Args:
        model: a causal language model, or a path or id; what the servers serve.
        tokenizer: its tokenizer; loaded from the path when left out.
        base_urls: the servers, such as `["http://127.0.0.1:8000"]`.
        in_flight: what becomes of requests that an update finds on their way: `"continue"` (they
            are cut where they are and go on under the new weights, `Completion.token_versions` says
            where) or `"wait"` (the update waits for them).
        max_model_len: prompt and completion together; default is the servers'.
        request_timeout_s: for one turn, waiting in the server included.
        health_interval_s: seconds between two looks at a server that has requests.
        seed: of requests that bring no seed.

    Raises:
        VLLMServerError: a server can't be reached, isn't what is needed, or differs from another.
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
    ) -> None:
        from agent_vllm.engines.servers.client import ClientThread, ServerClient
        from agent_vllm.engines.servers.fleet import Fleet

        _check_arguments(base_urls, in_flight)
        self._source = model_source(model, tokenizer)
        self._in_flight: InFlight = in_flight
        self._run = uuid.uuid4().hex[:8]
        self._is_checked = False
        self._thread = ClientThread()
        try:
            clients = [
                ServerClient(url, self._thread.session, request_timeout_s=request_timeout_s)
                for url in base_urls
            ]
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
            self._transfer = BACKENDS[self._facts.backend]()
            self._fleet.label = self._facts.weight_version
            self._thread.submit(self._fleet.watch())
            if not isinstance(model, str | Path):
                self._sync(model, version=0)
        except BaseException:
            self._thread.close()
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

    def close(self) -> None:
        """Let go of the servers, which run on; they are the user's own."""
        self._thread.close()

    # ---- weights ----

    def _load_weights(self, model: PreTrainedModel) -> None:
        self._sync(model, version=self.policy_version + 1)

    def _sync(self, model: PreTrainedModel, version: int) -> None:
        """Every learner process comes here: the first sends, and all leave together."""
        wait_for_all_ranks()  # one of them may still be asking the servers something
        check_weights(self._source.shapes, weight_shapes(model))
        label, error = f"{self._run}:{version}", None
        if is_first_rank():
            try:
                self._send(model, version, label)
            except Exception as caught:  # raised once the other processes know of it
                error = caught
        else:
            self._transfer.join(model)
        is_dead = isinstance(error, EngineDeadError)
        label, trouble, is_dead = from_first_rank((label, error and str(error), is_dead))
        if error is not None:
            raise error
        if trouble is not None:
            raised = EngineDeadError if is_dead else WeightSyncError
            raise raised(f"The first process could not send the weights: {trouble}")
        if not is_first_rank():
            self._thread.call(self._fleet.adopt(version, label))
        if not self._is_checked and not is_sharded(model):
            check_against_learner(
                plain_model(model),
                self._sample_all,
                vocab_size=self.vocab_size,
                dtype=getattr(torch, self._facts.dtype),
                num_prompts=2 * len(self._fleet.servers),  # each of them gets some
            )
            self._is_checked = True

    def _send(self, model: PreTrainedModel, version: int, label: str) -> None:
        call, fleet, routes = self._thread.call, self._fleet, _Routes(self._thread, self._fleet)
        try:
            with self._joined_if_it_fails(model):
                call(fleet.hold(self._in_flight))
                call(fleet.take_back(self._check_again))
                call(fleet.each(lambda server: server.client.name_weights(UNFINISHED)))
            self.num_synced_bytes = self._transfer.send(model, routes)
            call(fleet.each(lambda server: server.client.finish_update(label)))
            call(fleet.reset_caches())
        except BaseException as error:
            call(fleet.abandon(f"a weight update failed: {error}"))
            if isinstance(error, EngineError) and not isinstance(error, EngineDeadError):
                raise WeightSyncError(f"The weights did not reach the servers: {error}") from error
            raise
        call(fleet.go_on(version, label))

    @contextmanager
    def _joined_if_it_fails(self, model: PreTrainedModel) -> Iterator[None]:
        """The other processes gather the weights, whatever happens here."""
        try:
            yield
        except BaseException:
            self._transfer.join(model)
            raise

    def _sample_all(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        async def sample_all() -> list[Completion]:
            return await asyncio.gather(*map(self._fleet.sample, requests))

        return self._thread.call(sample_all())

    # ---- checks ----

    async def _check_all(self, max_model_len: int | None, weights_stay: bool) -> "ServerFacts":
        from agent_vllm.engines.servers.checks import check_agreement, check_server

        self._check = partial(check_server, source=self._source, max_model_len=max_model_len)
        servers = self._fleet.servers
        facts = await asyncio.gather(*(self._check(server.client) for server in servers))
        check_agreement(facts, weights_stay=weights_stay)
        for server, its_facts in zip(servers, facts, strict=True):
            server.num_workers = its_facts.num_workers
        return facts[0]

    async def _check_again(self, server: "Server") -> None:
        from agent_vllm.engines.servers.checks import check_agreement

        check_agreement([self._facts, await self._check(server.client)], weights_stay=False)


class _Routes:
    """The fleet as `weight_transfer` calls it, from the learner's thread."""

    def __init__(self, thread: "ClientThread", fleet: "Fleet") -> None:
        self._thread = thread
        self._fleet = fleet

    def start(self) -> None:
        self._call(lambda server: server.client.start_update())

    def update(self, info: dict[str, Any]) -> None:
        self._call(lambda server: server.client.update(info))

    def init(self, info_of: Callable[[int], dict[str, Any]]) -> None:
        sizes = self._fleet.sizes()
        before = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        self._call(lambda server: server.client.init_transfer(info_of(before[server])))

    def sizes(self) -> dict[str, int]:
        return {str(server): size for server, size in self._fleet.sizes().items()}

    def _call(self, call: "Callable[[Server], Awaitable[Any]]") -> None:
        self._thread.call(self._fleet.each(call))


def _check_arguments(base_urls: Sequence[str], in_flight: str) -> None:
    if isinstance(base_urls, str) or not base_urls:
        raise ValueError(
            "`base_urls` must be a list of the servers' addresses, such as "
            f'["http://127.0.0.1:8000"], got {base_urls!r}. `agent-vllm serve MODEL` starts one.'
        )
    if len(set(base_urls)) < len(base_urls):
        raise ValueError(f"`base_urls` must name each server once, got {list(base_urls)}.")
    if in_flight not in ("continue", "wait"):
        raise ValueError(f'`in_flight` must be "continue" or "wait", got {in_flight!r}.')
