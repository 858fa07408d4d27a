"""Check a `vllm serve` process before anything is trained with it.

Owns every check of a server when an engine is built, and again when a server comes back. Invariant:
a server that would sample other tokens or return other logprobs than the engine in this process is
refused, and the error says how to start it.
"""

import math
import reprlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from transformers import PreTrainedTokenizerBase

from agent_vllm.engines.learner import ModelSource
from agent_vllm.engines.models import model_sizes, own_gpu_id
from agent_vllm.engines.request import GenerationRequest
from agent_vllm.engines.server.answers import ServerConfig
from agent_vllm.engines.server.client import ServerClient
from agent_vllm.engines.server.http import KeyRefusedError, NoAnswerError, RefusedError
from agent_vllm.engines.server.weight_transfer import (
    BACKENDS,
    NCCL_BACKEND,
    UNFINISHED,
    is_first_rank,
)
from agent_vllm.errors import EngineError, VLLMServerError
from agent_vllm.settings import SamplingParams

VLLM_VERSIONS = SpecifierSet(">=0.31,<0.32", prereleases=True)  # whose routes are used
_NUM_LIKELIEST = 5
_START = "Start it with `agent-vllm serve MODEL`, which sets all that is needed."
_PROBE_TEXT = 'Hello, world! 12 + 30 = 42\n{"name": "é汉"}'


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """Hold what an engine knows about one server."""

    url: str
    model: str
    vllm_version: str
    dtype: str
    max_model_len: int
    backend: str
    num_workers: int
    weights_name: str
    probe: tuple[float, ...]  # logprobs of a fixed prompt's most likely next tokens


async def check_server(
    client: ServerClient, source: ModelSource, *, max_model_len: int | None
) -> ServerFacts:
    """Run all checks on one server.

    Raises:
        VLLMServerError: it can't be reached, or a check failed.
    """
    try:
        return await _check(client, source, max_model_len)
    except NoAnswerError as error:
        raise VLLMServerError(
            f"The vLLM server at {client.url} can't be reached: {error} Is it running, and is the "
            "port right?"
        ) from error
    except KeyRefusedError as error:
        raise VLLMServerError(str(error)) from error
    except EngineError as error:
        raise VLLMServerError(
            f"{client.url} doesn't answer as a vLLM server does: {error} Does something else "
            "listen on that port?"
        ) from error


async def _check(
    client: ServerClient, source: ModelSource, max_model_len: int | None
) -> ServerFacts:
    version = await client.version()
    if not VLLM_VERSIONS.contains(version):
        raise VLLMServerError(
            f"{client.url} runs vLLM {version}; the engine needs {VLLM_VERSIONS}, whose routes it "
            "was written for."
        )
    config = await _dev_config(client)
    model = config.served
    backend = _check_settings(client, config, max_model_len)
    await _check_sizes(client, source, model.model)
    if backend == NCCL_BACKEND:
        await _check_gpu(client)
    weights_name = await client.weights_name() or UNFINISHED
    if weights_name == UNFINISHED:
        await _drop_update(client)
    if await client.is_paused():  # by a trainer that has ended
        await client.resume()
    await _check_tokenizer(client, source.tokenizer, model.model)
    return ServerFacts(
        url=client.url,
        model=model.model,
        vllm_version=version,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        backend=backend,
        num_workers=await client.num_workers(),
        weights_name=weights_name,
        probe=()
        if weights_name == UNFINISHED
        else await _check_tokens(client, source, model.model),
    )


async def _dev_config(client: ServerClient) -> ServerConfig:
    try:
        return await client.config()
    except RefusedError as error:
        raise VLLMServerError(
            f"{client.url} has no development routes, so that no weights can be sent to it. Set "
            f"VLLM_SERVER_DEV_MODE=1 where it is started. {_START}"
        ) from error


async def _drop_update(client: ServerClient) -> None:
    """End an update that an earlier trainer left unfinished; until then there are no weights."""
    with suppress(RefusedError):  # vLLM drops an update that fails, and this one is not complete
        await client.update({"is_complete": True})
        await client.finish_update(UNFINISHED)


def _check_settings(client: ServerClient, config: ServerConfig, max_model_len: int | None) -> str:
    """Return the name of its weight-transfer backend."""
    model = config.served
    if model.logprobs_mode != "processed_logprobs":
        raise VLLMServerError(
            f"{client.url} must give logprobs of the distribution that is sampled from, got "
            f"`--logprobs-mode {model.logprobs_mode}`. Start it with `--logprobs-mode "
            "processed_logprobs`."
        )
    if max_model_len is not None and model.max_model_len < max_model_len:
        raise VLLMServerError(
            f"{client.url} has `--max-model-len {model.max_model_len}`, and the engine was "
            f"asked for {max_model_len}."
        )
    extension = config.parallel_config.worker_extension_cls
    if not (extension or "").startswith("agent_vllm."):
        raise VLLMServerError(
            f"{client.url} must run this package's worker extension, which knows whether somebody "
            f"else changed the weights, got `--worker-extension-cls {extension}`. {_START}"
        )
    backend = config.weight_transfer_config and config.weight_transfer_config.backend
    if backend not in BACKENDS:
        raise VLLMServerError(
            f"{client.url} must have a weight-transfer backend of {list(BACKENDS)}, got "
            f"{backend!r}. {_START}"
        )
    return backend


async def _check_gpu(client: ServerClient) -> None:
    """Check that the learner's process, if it sends weights, is on none of the server's GPUs."""
    own = own_gpu_id()
    if own is not None and is_first_rank() and own in await client.gpu_ids():
        raise VLLMServerError(
            f"{client.url} serves on the learner's own GPU, which NCCL refuses. Start it with "
            "`agent-vllm serve MODEL --same-gpu`, give it another GPU with CUDA_VISIBLE_DEVICES, "
            'or use rollout_engine="vllm".'
        )


async def _check_sizes(client: ServerClient, source: ModelSource, model: str) -> None:
    ours, theirs = model_sizes(source.config), await client.model_sizes()
    if ours != theirs:
        raise VLLMServerError(
            f"{client.url} serves another model, {model}: {reprlib.repr(theirs)} instead of {ours}."
        )


async def _check_tokens(client: ServerClient, source: ModelSource, model: str) -> tuple[float, ...]:
    """Check that it takes all of the model's token ids and returns the right logprobs."""
    try:
        await client.generate(probe_request([source.vocab_size - 1]))
    except RefusedError as error:
        if error.status == 404:
            raise VLLMServerError(
                f"{client.url} takes no token ids. Start it with `--enable-scale-out`. {_START}"
            ) from error
        raise VLLMServerError(
            f"{client.url} serves another model, {model}: it refuses the model's last "
            f"token id {source.vocab_size - 1}: {error}"
        ) from error
    return await _probe(client, source)


async def _check_tokenizer(
    client: ServerClient, tokenizer: PreTrainedTokenizerBase, model: str
) -> None:
    """Compare the tokenizers on a text that shows added tokens and other merges."""
    text = _PROBE_TEXT + "".join(sorted(map(str, tokenizer.added_tokens_decoder.values())))
    ours = tokenizer.encode(text, add_special_tokens=False)
    try:
        theirs = await client.tokenize(text)
    except RefusedError as error:
        raise VLLMServerError(
            f"{client.url} has no tokenizer: {error} Start it without `--skip-tokenizer-init`."
        ) from error
    if ours != theirs:
        where = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        raise VLLMServerError(
            f"{client.url} has another tokenizer (of {model}): of a test text it makes "
            f"{theirs[where : where + 5]} where the engine's makes {ours[where : where + 5]}, from "
            f"token {where} on. Save the tokenizer beside the model that is served, or start the "
            "server with `--tokenizer`."
        )


async def _probe(client: ServerClient, source: ModelSource) -> tuple[float, ...]:
    """Check logprobs at two temperatures: they follow the temperature and are normalised.

    With processed logprobs the distance between two tokens is inverse to the temperature. With raw
    logprobs it is not, and logits sum to more than one.
    """
    prompt = [token % source.vocab_size for token in (5, 7, 11, 13)]
    at_one = await client.likeliest(probe_request(prompt, 1.0), _NUM_LIKELIEST)
    at_half = await client.likeliest(probe_request(prompt, 0.5), _NUM_LIKELIEST)
    shared = sorted(at_one.keys() & at_half.keys(), key=lambda token: -at_one[token])
    if not shared:
        raise EngineError("no token is among the likeliest at temperature 1 and at 0.5.")
    spread = at_one[shared[0]] - at_one[shared[-1]]
    spread_at_half = at_half[shared[0]] - at_half[shared[-1]]
    is_normalised = sum(map(math.exp, at_one.values())) <= 1.01
    if abs(spread_at_half - 2 * spread) > 0.05 + 0.05 * abs(spread) or not is_normalised:
        raise VLLMServerError(
            f"The logprobs of {client.url} are not those of the distribution that is sampled from: "
            f"two tokens are {spread:.3f} apart at temperature 1 and {spread_at_half:.3f} at 0.5, "
            f"where it should be {2 * spread:.3f}. Start it with `--logprobs-mode "
            "processed_logprobs`."
        )
    return tuple(round(at_one[token], 3) for token in shared)


def probe_request(prompt_ids: list[int], temperature: float = 1.0) -> GenerationRequest:
    """Return a request for one token."""
    sampling = SamplingParams(temperature=temperature)
    return GenerationRequest(prompt_ids=prompt_ids, max_new_tokens=1, sampling=sampling, seed=0)


def check_agreement(facts: Sequence[ServerFacts], *, weights_stay: bool) -> None:
    """Check that the servers of one engine are interchangeable.

    Args:
        weights_stay: the servers keep the weights that they have now.

    Raises:
        VLLMServerError: two of them differ; says in what.
    """
    names = ["model", "vllm_version", "dtype", "max_model_len", "backend"]
    names += ["weights_name", "probe"] if weights_stay else []
    for other in facts[1:]:
        for name in names:
            if getattr(facts[0], name) != getattr(other, name):
                raise VLLMServerError(
                    f"The servers disagree on `{name}`: {facts[0].url} has "
                    f"{getattr(facts[0], name)!r}, {other.url} has {getattr(other, name)!r}. Start "
                    "all of them the same way."
                )
    if weights_stay and facts[0].weights_name == UNFINISHED:
        raise VLLMServerError(
            f"{facts[0].url} was left in the middle of a weight update, or somebody changed its "
            "weights. Start it again."
        )
