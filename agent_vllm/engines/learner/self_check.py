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
from agent_vllm.training import GapBound, LogprobGap, logprob_gap, predicted_logprobs
from agent_vllm.types import Completion

_FLOAT32 = GapBound(mean=1e-4, worst=1e-3)  # kernels differ by 1e-5
_TF32 = GapBound(mean=2e-2, worst=2e-2)  # on CUDA, vLLM's float32 attention multiplies in TF32
_HALF = GapBound(mean=0.1, worst=2.0)  # 0.03 in the mean; of 200 tokens one was seen 0.6 away
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
    bound = gap_bound(dtype, model.dtype, device=model.device)
    if not bound.holds(gap):
        raise WeightSyncError(
            f"After the first sync the engine's logprobs are away from the learner's by {gap} "
            f"({bound} are normal in {dtype}). vLLM's implementation of this model doesn't hold "
            "the same weights; use the torch engine."
        )


def gap_bound(*dtypes: torch.dtype | None, device: torch.device) -> GapBound:
    """Return the gap that rounding explains.

    Args:
        dtypes: that engine and learner compute in; None where it is not known.
        device: of the learner.
    """
    if any(dtype not in (torch.float32, torch.float64) for dtype in dtypes):
        return _HALF
    return _TF32 if device.type == "cuda" else _FLOAT32


def gap_to(
    model: PreTrainedModel,
    sample: Callable[[list[GenerationRequest]], Sequence[Completion]],
    vocab_size: int,
    num_prompts: int,
) -> LogprobGap:
    """Return how far the logprobs of a few sampled tokens are from the learner's."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for seed in range(num_prompts):
        length, num_tokens = _LENGTHS[seed % 2]
        prompt = torch.randint(vocab_size, (length,), generator=generator).tolist()
        requests.append(GenerationRequest(prompt_ids=prompt, max_new_tokens=num_tokens, seed=seed))
    completions = sample(requests)
    engine = torch.tensor([[value for one in completions for value in one.logprobs]])
    learner = torch.cat(
        [
            _learner_logprobs(model, request.prompt_ids, completion)
            for request, completion in zip(requests, completions, strict=True)
        ]
    )[None]
    return logprob_gap(engine, learner, torch.ones_like(engine))


def _learner_logprobs(
    model: PreTrainedModel, prompt_ids: list[int], completion: Completion
) -> torch.Tensor:
    ids = torch.tensor([prompt_ids + completion.token_ids], device=model.device)
    with evaluating(model):
        logprobs = predicted_logprobs(model(input_ids=ids).logits, ids)
    return logprobs[0, len(prompt_ids) - 1 :].cpu()
