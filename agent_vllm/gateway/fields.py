"""Define the fields of a chat completion request, and refuse those that can't be obeyed.

Invariant: each field that a client sends is obeyed, is a label that changes nothing, has the value
that it would have anyway, or is refused by its name.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from agent_vllm.settings import SamplingParams

Count = Annotated[int, Field(ge=1)]


class Refused(Exception):
    """The request gets an error in the OpenAI API's form; nothing was sampled."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": "invalid_request_error", "code": self.code}
        return {"error": error}


def _named(function: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(function.get("name"), str):
        raise ValueError("a dict with a `name`")
    return function


class OfferedTool(BaseModel):
    """Hold a tool on offer; `function` is shown to the model as it is, without `strict`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: Annotated[dict[str, Any], AfterValidator(_named)]

    @property
    def shown(self) -> dict[str, Any]:
        # No engine constrains what is sampled: the learner could not reproduce the distribution.
        shown = {k: v for k, v in self.function.items() if k != "strict" and v is not None}
        return {"type": self.type, "function": shown}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ChatRequest(BaseModel):
    """Hold a checked request. A field that may only have its neutral value is never read."""

    model_config = ConfigDict(extra="forbid")

    # obeyed
    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[OfferedTool] | None = None
    stop: str | list[str] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # the rollout's own, or left out
    temperature: float | None = None
    top_p: float | None = None

    # neutral
    n: Literal[1] | None = None
    tool_choice: Literal["auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    seed: None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    # labels
    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def token_limit(self) -> int | None:
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits, default=None)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


_WHY = {
    "seed": "Each trajectory has its own seed; with the same one the samples of a group would be "
    "the same.",
    "tool_choice": "No engine constrains what is sampled, since the learner could not reproduce "
    "the distribution.",
    "response_format": "No engine constrains what is sampled, since the learner could not "
    "reproduce the distribution.",
    "n": "Send one request per answer.",
}


def read_request(body: bytes, model: str, sampling: SamplingParams) -> ChatRequest:
    """Return the request that the body holds.

    Args:
        model: the only name that is served.
        sampling: how the rollout samples.

    Raises:
        Refused: the body is no request, or a field can't be obeyed; names it.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise Refused(_problem(error)) from None
    if request.model != model:
        raise Refused(
            f"`model` must be {model!r}, got {request.model!r}.", status=404, code="model_not_found"
        )
    for name in ("temperature", "top_p"):
        value, own = getattr(request, name), getattr(sampling, name)
        if value not in (None, own):
            raise Refused(
                f"`{name}` must be the rollout's, {own:g}, got {value:g}: tokens of another "
                "distribution can't be trained. Leave it out."
            )
    return request


def _problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    if problem["type"] == "json_invalid":
        return f"The body must be JSON. {problem['msg']}."
    name = ".".join(map(str, problem["loc"])) or "body"
    if problem["type"] == "missing":
        return f"`{name}` is missing."
    got = repr(problem["input"])[:80]
    field = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden" or field in _WHY:
        why = _WHY.get(field, "It is none of the fields that are obeyed.")
        return f"`{name}` can't be obeyed, got {got}. {why} Leave it out."
    wanted = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"`{name}` must be {wanted}, got {got}."
