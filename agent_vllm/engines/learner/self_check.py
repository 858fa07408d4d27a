"""Check after a run's first sync that the engine samples from the learner's distribution.

Owns which prompts are sampled and how far apart the logprobs may be. Invariant: an engine with
other weights than the learner's fails.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from agent_vllm.engines.models import evaluating
from agent_vllm.engines.request import GenerationRequest
from agent_vllm.errors import WeightSyncError
from agent_vllm.training import predicted_logprobs
from agent_vllm.types import Completion

_TOLERANCE = {torch.float32: 1e-3}  # nats; coarser types differ by 0.03 per token
_TOLERANCE_HALF = 0.5
_LENGTHS = ((8, 8), (5, 4))  # of prompt and completion: rows of a batch begin and end apart


def check_against_learner(
    model: PreTrainedModel,
    sample: Callable[[list[GenerationRequest]], Sequence[Completion]],
    *,
    vocab_size: int,
    dtype: torch.dtype,
    num_prompts: int = 2,
) -> None:
    """Compare the logprobs of a few sampled tokens with the learner's.

    Args:
        model: the learner's transformers model; not sharded.
        sample: samples one completion per request with the engine.
        dtype: of the engine's weights.

    Raises:
        WeightSyncError: the difference is larger than rounding explains.
    """
    gap = gap_to(model, sample, vocab_size, num_prompts)
    tolerance = tolerance_of(dtype)
    if not gap <= tolerance:
        raise WeightSyncError(
            f"After the first sync the engine's logprobs are {gap:.3g} away from the learner's (at "
            f"most {tolerance:g} is normal in {dtype}). vLLM's implementation of this model "
            "doesn't hold the same weights; use the torch engine."
        )


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest difference that rounding explains, in nats."""
    return _TOLERANCE.get(dtype, _TOLERANCE_HALF)


def gap_to(
    model: PreTrainedModel,
    sample: Callable[[list[GenerationRequest]], Sequence[Completion]],
    vocab_size: int,
    num_prompts: int,
) -> float:
    """Return the largest difference of a sampled logprob from the learner's, in nats."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for seed in range(num_prompts):
        length, num_tokens = _LENGTHS[seed % 2]
        prompt = torch.randint(vocab_size, (length,), generator=generator).tolist()
        requests.append(GenerationRequest(prompt_ids=prompt, max_new_tokens=num_tokens, seed=seed))
    return max(
        _gap(model, request.prompt_ids, completion)
        for request, completion in zip(requests, sample(requests), strict=True)
    )


def _gap(model: PreTrainedModel, prompt_ids: list[int], completion: Completion) -> float:
    device = next(model.parameters()).device
    ids = torch.tensor([prompt_ids + completion.token_ids], device=device)
    with evaluating(model):
        learner = predicted_logprobs(model(input_ids=ids).logits, ids)[0, len(prompt_ids) - 1 :]
    return (learner.cpu() - torch.tensor(completion.logprobs)).abs().max().item()
