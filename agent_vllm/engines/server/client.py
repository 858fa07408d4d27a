"""Call one `vllm serve` process over HTTP.

Owns the names of vLLM's routes and the timeout of each call. Knows nothing of other servers.
Invariant: a completion that it returns has the form that vLLM documents.
"""

import asyncio
import threading
import uuid
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import aiohttp

from agent_vllm.engines.request import GenerationRequest
from agent_vllm.engines.server.http import JsonClient
from agent_vllm.errors import EngineError

T = TypeVar("T")

TRANSFER_TIMEOUT_S = 600.0  # for one part of the weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Hold the answer to one request; "abort" means that a pause of the server cut it."""

    token_ids: list[int]  # [N]
    logprobs: list[float]  # [N]
    finish_reason: Literal["stop", "length", "abort"]
    num_prompt_tokens: int
    num_cached_tokens: int


class ServerClient(JsonClient):
    """Call one server, on the event loop of its session.

    Args:
        base_url: such as "http://127.0.0.1:8000".
        request_timeout_s: for one generation, queueing included.
    """

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, *, request_timeout_s: float
    ) -> None:
        super().__init__(base_url, session)
        self._request_timeout_s = request_timeout_s

    # ---- generation ----

    async def generate(self, request: GenerationRequest) -> Answer:
        """Sample one sequence. Every call uses a new request id.

        Raises:
            NoAnswerError, RefusedError: as for every call.
            EngineError: the answer is not a completion.
        """
        body = await self.generate_json(request)
        try:
            return _answer(body)
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(
                f"{self.url} answered /inference/v1/generate with no completion: {body!r:.300}"
            ) from error

    async def generate_json(self, request: GenerationRequest, num_logprobs: int = 0) -> Any:
        """Return the raw answer, with the `num_logprobs` most likely tokens per position."""
        return await self.post(
            "/inference/v1/generate",
            {
                "request_id": uuid.uuid4().hex,
                "token_ids": request.prompt_ids,
                "sampling_params": {**sampling_params(request), "logprobs": num_logprobs},
            },
            timeout_s=self._request_timeout_s,
        )

    # ---- information ----

    async def config(self) -> dict[str, Any]:
        """Return vLLM's whole configuration. Needs `VLLM_SERVER_DEV_MODE=1`."""
        info = await self.get("/server_info", params={"config_format": "json"})
        return info["vllm_config"]

    async def weight_version(self) -> str:
        """Return the label of its weights; "default" for those it was started with."""
        return (await self.get("/weight_info"))["weight_version"]

    # ---- weights ----

    async def pause(self) -> None:
        """Schedule nothing more; running requests end at once with what they have."""
        await self.post("/pause", params={"mode": "abort"})

    async def abort_all(self) -> None:
        """Abort requests that were queued while the server was paused."""
        await self.post("/abort_requests", {})

    async def resume(self) -> None:
        await self.post("/resume")

    async def is_paused(self) -> bool:
        return (await self.get("/is_paused"))["is_paused"]

    async def name_weights(self, label: str) -> None:
        await self.post("/update_weight_version", {"new_version": label})

    async def start_update(self) -> None:
        await self.post("/start_weight_update", timeout_s=TRANSFER_TIMEOUT_S)

    async def update(self, info: dict[str, Any]) -> None:
        await self.post("/update_weights", {"update_info": info}, timeout_s=TRANSFER_TIMEOUT_S)

    async def finish_update(self, label: str) -> None:
        body = {"weight_version": label}
        await self.post("/finish_weight_update", body, timeout_s=TRANSFER_TIMEOUT_S)

    async def init_transfer(self, info: dict[str, Any]) -> None:
        body = {"init_info": info}
        await self.post("/init_weight_transfer_engine", body, timeout_s=TRANSFER_TIMEOUT_S)

    async def reset_prefix_cache(self) -> bool:
        return (await self.post("/reset_prefix_cache"))["success"]


def sampling_params(request: GenerationRequest) -> dict[str, Any]:
    """Return fields of vLLM's `SamplingParams`, so that a server samples as other engines do."""
    return {
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "top_k": request.sampling.top_k,
        "min_p": request.sampling.min_p,
        "seed": request.seed,
        "max_tokens": request.max_new_tokens,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # what ends a sequence is in the request, not in the server's files
        "stop": list(request.sampling.stop_strings),
        "detokenize": bool(request.sampling.stop_strings),
        "skip_special_tokens": False,
    }


def _answer(body: dict[str, Any]) -> Answer:
    choice, usage = body["choices"][0], body["usage"]
    entries = (choice["logprobs"] or {}).get("content") or []
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        token_ids=choice["token_ids"] or [],
        logprobs=[entry["logprob"] for entry in entries],
        finish_reason=choice["finish_reason"],
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=details.get("cached_tokens") or 0,
    )


class ClientThread:
    """Run the connections' event loop on its own thread: rollouts run on many loops."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="vllm server client"
        )
        self._thread.start()
        self.session = self.call(_new_session())

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; cancelling the future cancels it.

        Raises:
            EngineError: the thread has ended.
        """
        if self._loop.is_closed():
            work.close()
            raise EngineError("The engine is closed.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result."""
        return self.submit(work).result()

    def close(self) -> None:
        """Cancel all tasks, close the connections (which aborts their requests), end the thread."""
        if self._loop.is_closed():
            return
        self.call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.session.close()


async def _new_session() -> aiohttp.ClientSession:
    # vLLM closes connections after 5 s idle; closing one just as a call goes out fails the call
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(connector=connector)
