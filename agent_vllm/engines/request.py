"""One request to an engine and the completion that may answer it.

Invariant: a request that passes `check_prompt` can be served, and a completion that passes
`check_completion` can be trained on.
"""

import array
import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from agent_vllm.errors import EngineError, InvalidRequestError
from agent_vllm.settings import SamplingParams
from agent_vllm.types import Completion

_NEUTRAL = SamplingParams()
_ROUNDING = 1e-4  # of a logprob near 0.0; a GPU's kernels round up too


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerationRequest:
    """Ask for one sequence.

    Engines get requests checked: `RolloutEngine.sample` has cut `max_new_tokens` to what fits and
    put the engine's own end tokens among `stop_token_ids`.

    Attributes:
        num_checked_ids: leading prompt ids that this engine checked in an earlier turn; they are
            not checked again.
        affinity: names the trajectory; an engine of several servers keeps its requests on one,
            where their prefix is cached.
    """

    prompt_ids: list[int]  # [P]
    max_new_tokens: int
    seed: int
    sampling: SamplingParams = _NEUTRAL
    stop_token_ids: tuple[int, ...] = ()
    num_checked_ids: int = 0
    affinity: str | None = None


def check_prompt(
    prompt_ids: Sequence[int], *, num_checked: int, vocab_size: int, max_model_len: int
) -> None:
    """Check the ids after the first `num_checked`, and the length.

    Raises:
        InvalidRequestError: names the value.
    """
    try:
        ids = array.array("q", prompt_ids[num_checked:] if num_checked else prompt_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(
            f"`prompt_ids` must be a list of ints, got {type(prompt_ids).__name__}: {error}."
        ) from error
    if len(prompt_ids) == 0:
        raise InvalidRequestError("`prompt_ids` must hold at least one token, got none.")
    lowest, highest = min(ids, default=0), max(ids, default=0)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequestError(
            f"Token id {wrong} is out of the engine's vocabulary of {vocab_size}. Were tokens "
            "added to the tokenizer after the model was made? Resize the model's embeddings "
            "before the engine is built."
        )
    if len(prompt_ids) >= max_model_len:
        raise InvalidRequestError(
            f"The prompt has {len(prompt_ids)} tokens; with `max_model_len` {max_model_len} none "
            "is left to sample."
        )


def check_completion(completion: Completion, request: GenerationRequest, vocab_size: int) -> None:
    """Check that the completion answers the request: its length, its ids and its logprobs.

    Raises:
        EngineError: says what is wrong.
    """
    ids, logprobs = completion.token_ids, completion.logprobs
    if not 1 <= len(ids) <= request.max_new_tokens:
        raise EngineError(
            f"The engine sampled {len(ids)} tokens where 1 to {request.max_new_tokens} were asked "
            "for."
        )
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise EngineError(f"The engine sampled an id out of its vocabulary of {vocab_size}.")
    if None not in logprobs and all(map(math.isfinite, logprobs)) and max(logprobs) <= _ROUNDING:
        return
    index, logprob = next(pair for pair in enumerate(logprobs) if not _is_logprob(pair[1]))
    raise EngineError(
        f"The engine gave logprob {logprob} for token {index} of {len(logprobs)}; the completion "
        "is dropped. Logprobs must be finite and at most 0. Are the weights finite?"
    )


def _is_logprob(value: float | None) -> bool:
    return value is not None and -math.inf < value <= _ROUNDING


def ends_on_string(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], strings: Sequence[str]
) -> bool:
    """Return whether the last token completes one of the strings in the text of the ids."""
    if not strings:
        return False
    # Every token but those inside a character adds at least one; a character has up to four bytes.
    tail = list(token_ids[-4 * max(map(len, strings)) - 4 :])
    text = tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(string in text for string in strings)
