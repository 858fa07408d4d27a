"""Call one `vllm serve` process over HTTP.

Owns the names of vLLM's routes and the timeout of each call. Knows nothing of other servers.
Invariant: a completion that it returns answers the request: as many logprobs as ids, no more than
were asked for, all of them in the vocabulary.
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
from agent_vllm.engines.server.answers import (
    CacheReset,
    Choice,
    Generated,
    ModelSizes,
    PauseState,
    SampledToken,
    ServerAnswer,
    ServerConfig,
    ServerInfo,
    Tokenized,
    VLLMVersion,
    WorkerTexts,
    WorldSize,
)
from agent_vllm.engines.server.http import JsonClient
from agent_vllm.errors import EngineError

T = TypeVar("T")

TRANSFER_TIMEOUT_S = 600.0  # for one part of the weights
_FIRST_CALL_S = 10.0
_TOKEN_BYTES = 4 << 10  # of an answer; a token with its likeliest rivals takes less than 1 KiB
_GENERATE = "/inference/v1/generate"


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
        base_url: such as "http://127.0.0.1:8000", as `server_url` returns it.
        vocab_size: ids must be below it.
        request_timeout_s: for one generation, queueing included.
        api_key: sent with every call.
    """

    def __init__(
        self,
        base_url: str,
        session: aiohttp.ClientSession,
        *,
        vocab_size: int,
        request_timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        super().__init__(base_url, session, api_key=api_key)
        self._vocab_size = vocab_size
        self._request_timeout_s = request_timeout_s

    # ---- generation ----

    async def generate(self, request: GenerationRequest) -> Answer:
        """Sample one sequence. Every call uses a new request id.

        Raises:
            NoAnswerError, RefusedError: as for every call.
            EngineError: the answer is no completion of this request.
        """
        answer = _answer(await self._generate(request))
        if misfit := _misfit(answer, request, self._vocab_size):
            raise EngineError(f"POST {self.url}{_GENERATE}: the completion is dropped: {misfit}.")
        return answer

    async def likeliest(self, request: GenerationRequest, num: int) -> dict[str, float]:
        """Return the logprobs of the most likely first tokens, by what the server calls them."""
        content = _content((await self._generate(request, num)).choices[0])
        if not content or not content[0].top_logprobs:
            raise EngineError(
                f"{self.url}{_GENERATE}: no `top_logprobs` where {num} were asked for."
            )
        return {top.token: top.logprob for top in content[0].top_logprobs}

    async def _generate(self, request: GenerationRequest, num_logprobs: int = 0) -> Generated:
        return await self.post(
            _GENERATE,
            Generated,
            {
                "request_id": uuid.uuid4().hex,
                "token_ids": request.prompt_ids,
                "sampling_params": {**sampling_params(request), "logprobs": num_logprobs},
            },
            timeout_s=self._request_timeout_s,
            max_bytes=(1 << 20) + _TOKEN_BYTES * request.max_new_tokens,
        )

    # ---- information ----

    async def version(self) -> str:
        """Return vLLM's version, soon: this is the first call to a server."""
        return (await self.get("/version", VLLMVersion, timeout_s=_FIRST_CALL_S)).version

    async def config(self) -> ServerConfig:
        """Return vLLM's configuration. Needs `VLLM_SERVER_DEV_MODE=1`."""
        params = {"config_format": "json"}
        return (await self.get("/server_info", ServerInfo, params=params)).vllm_config

    async def num_workers(self) -> int:
        return (await self.get("/get_world_size", WorldSize)).world_size

    async def tokenize(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return (await self.post("/tokenize", Tokenized, body)).tokens

    async def model_sizes(self) -> dict[str, Any]:
        """Return the served model's sizes, as `models.model_sizes` does for the learner."""
        answer = await self.post("/collective_rpc", ModelSizes, {"method": "model_sizes"})
        return answer.results[0]

    async def gpu_ids(self) -> list[str | None]:
        """Return what identifies each worker's GPU, as `models.gpu_id` does."""
        return (await self.post("/collective_rpc", WorkerTexts, {"method": "gpu_id"})).results

    async def weights_name(self) -> str | None:
        """Return the name that was given to its weights; None if they changed since.

        "default" names those that it was started with.
        """
        answer = await self.post("/collective_rpc", WorkerTexts, {"method": "weights_name"})
        names = set(answer.results)
        return names.pop() if len(names) == 1 else None

    # ---- weights ----

    async def pause(self) -> None:
        """Schedule nothing more; running requests end at once with what they have."""
        await self.post("/pause", ServerAnswer, params={"mode": "abort"})

    async def abort_all(self) -> None:
        """Abort requests that were queued while the server was paused."""
        await self.post("/abort_requests", ServerAnswer, {})

    async def resume(self) -> None:
        await self.post("/resume", ServerAnswer)

    async def is_paused(self) -> bool:
        return (await self.get("/is_paused", PauseState)).is_paused

    async def name_weights(self, name: str) -> None:
        """Name the weights as they are now, for `weights_name` and for whoever asks vLLM."""
        await self.post("/update_weight_version", ServerAnswer, {"new_version": name})
        body = {"method": "name_weights", "args": [name]}
        await self.post("/collective_rpc", ServerAnswer, body)

    async def start_update(self) -> None:
        await self.post("/start_weight_update", ServerAnswer, timeout_s=TRANSFER_TIMEOUT_S)

    async def update(self, info: dict[str, Any]) -> None:
        body = {"update_info": info}
        await self.post("/update_weights", ServerAnswer, body, timeout_s=TRANSFER_TIMEOUT_S)

    async def finish_update(self, name: str) -> None:
        """End an update and name the weights that it brought."""
        await self.post("/finish_weight_update", ServerAnswer, timeout_s=TRANSFER_TIMEOUT_S)
        await self.name_weights(name)

    async def init_transfer(self, info: dict[str, Any]) -> None:
        body = {"init_info": info}
        await self.post(
            "/init_weight_transfer_engine", ServerAnswer, body, timeout_s=TRANSFER_TIMEOUT_S
        )

    async def reset_prefix_cache(self) -> bool:
        return (await self.post("/reset_prefix_cache", CacheReset)).success


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


def _answer(generated: Generated) -> Answer:
    choice, usage = generated.choices[0], generated.usage
    details = usage.prompt_tokens_details
    return Answer(
        token_ids=choice.token_ids or [],
        logprobs=[token.logprob for token in _content(choice)],
        finish_reason=choice.finish_reason,
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=(details and details.cached_tokens) or 0,
    )


def _misfit(answer: Answer, request: GenerationRequest, vocab_size: int) -> str | None:
    """Return why the answer can't be one to this request, or None."""
    ids, num_prompt_tokens = answer.token_ids, len(request.prompt_ids)
    if len(ids) != len(answer.logprobs):
        return f"it has {len(ids)} tokens with {len(answer.logprobs)} logprobs"
    if len(ids) > request.max_new_tokens:
        return f"it has {len(ids)} tokens where {request.max_new_tokens} were asked for"
    if max(ids, default=0) >= vocab_size:
        return f"its id {max(ids)} is out of the vocabulary of {vocab_size}"
    if answer.num_prompt_tokens != num_prompt_tokens:
        return f"it is of {answer.num_prompt_tokens} prompt tokens, not of {num_prompt_tokens}"
    return None


def _content(choice: Choice) -> list[SampledToken]:
    return (choice.logprobs and choice.logprobs.content) or []


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
    return aiohttp.ClientSession(
        connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    )
