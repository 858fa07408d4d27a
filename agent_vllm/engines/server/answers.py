"""Define the form of every answer that a `vllm serve` process gives.

A server is a stranger: its answers are checked here before anything else looks at them. Invariant:
what passes has the types, counts and ranges that vLLM documents; numbers are never made of text.
"""

from typing import Annotated, Any, Literal

from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from agent_vllm.engines.models import to_dtype

Text = Annotated[str, Field(max_length=1000)]
Logprob = Annotated[float, Field(le=100.0)]  # a logit, where vLLM's settings are wrong


class ServerAnswer(BaseModel):
    """Accept a JSON object. Used as it is where only the status says something."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


# ---- generation ----


class LikelyToken(ServerAnswer):
    """Hold one of the most likely tokens at a position."""

    token: Text
    logprob: Logprob


class SampledToken(ServerAnswer):
    """Hold what is said of one sampled token."""

    logprob: Logprob
    top_logprobs: list[LikelyToken] = []


class SampledTokens(ServerAnswer):
    """Hold what is said of all sampled tokens."""

    content: list[SampledToken] | None = None  # [N]


class Choice(ServerAnswer):
    """Hold one sampled sequence; "abort" means that a pause of the server cut it."""

    token_ids: list[NonNegativeInt] | None  # [N]
    logprobs: SampledTokens | None
    finish_reason: Literal["stop", "length", "abort"]


class PromptDetails(ServerAnswer):
    """Say what was found in the prefix cache."""

    cached_tokens: NonNegativeInt | None = None


class Usage(ServerAnswer):
    """Count a request's tokens."""

    prompt_tokens: NonNegativeInt
    prompt_tokens_details: PromptDetails | None = None


class Generated(ServerAnswer):
    """`/inference/v1/generate`, for one sequence."""

    choices: list[Choice] = Field(min_length=1, max_length=1)
    usage: Usage


# ---- information ----


def _dtype_name(value: str) -> str:
    return str(to_dtype(value)).removeprefix("torch.")


class VLLMVersion(ServerAnswer):
    """`/version`."""

    version: Annotated[Text, AfterValidator(lambda text: str(Version(text)))]


class ServedModel(ServerAnswer):
    """Hold what vLLM calls the model's configuration."""

    model: Text
    dtype: Annotated[Text, AfterValidator(_dtype_name)]  # such as "bfloat16"
    max_model_len: PositiveInt
    logprobs_mode: Text


class Parallelism(ServerAnswer):
    """Hold the part of vLLM's parallel configuration that is checked."""

    worker_extension_cls: Text | None


class TransferConfig(ServerAnswer):
    """Name the backend for weights."""

    backend: Text


class ServerConfig(ServerAnswer):
    """Hold the parts of vLLM's configuration that are checked."""

    served: ServedModel = Field(alias="model_config")
    parallel_config: Parallelism
    weight_transfer_config: TransferConfig | None


class ServerInfo(ServerAnswer):
    """`/server_info`."""

    vllm_config: ServerConfig


class WorldSize(ServerAnswer):
    """`/get_world_size`."""

    world_size: Annotated[int, Field(ge=1, le=1_000_000)]


class Tokenized(ServerAnswer):
    """`/tokenize`."""

    tokens: list[NonNegativeInt]


class ModelSizes(ServerAnswer):
    """`/collective_rpc` of the worker extension's `model_sizes`."""

    results: list[dict[str, Any]] = Field(min_length=1)  # one per worker


class WorkerTexts(ServerAnswer):
    """`/collective_rpc` of the worker extension's `weights_name` and `gpu_id`."""

    results: list[Text | None] = Field(min_length=1)  # one per worker


# ---- weight updates ----


class PauseState(ServerAnswer):
    """`/is_paused`."""

    is_paused: bool


class CacheReset(ServerAnswer):
    """`/reset_prefix_cache`."""

    success: bool
