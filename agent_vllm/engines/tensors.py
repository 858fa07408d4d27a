"""The tensor form of a rollout: padded prompts in, padded completions out.

Invariant: which positions are real is said by masks and lengths, never by pad ids.

Legend: B prompts, G generations each, P padded prompt length, R longest completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from agent_vllm.engines.models import pad_token_id
from agent_vllm.errors import InvalidRequestError
from agent_vllm.training import pad_rows
from agent_vllm.types import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """Hold what `RolloutEngine.rollout` sampled; the G rows of a prompt stand together."""

    output_ids: torch.Tensor  # [B*G, P+R], the prompts as they were given, then the completions
    completion_ids: torch.Tensor  # [B*G, R], right-padded
    per_token_logps: torch.Tensor  # [B*G, R] float32, 0.0 on padding
    completion_mask: torch.Tensor  # [B*G, R], 1 on sampled tokens, by length
    prompt_lens: torch.Tensor  # [B*G], real lengths
    completions: list[str]  # B*G


def prompt_rows(
    prompt_ids: torch.Tensor, attention_mask: torch.Tensor, num_generations: int
) -> list[list[int]]:
    """Return the prompts' real tokens, each G times, `[B*G]`.

    Raises:
        InvalidRequestError: shapes differ, or G is less than 1.
    """
    if prompt_ids.ndim != 2 or prompt_ids.shape != attention_mask.shape:
        raise InvalidRequestError(
            "`prompt_ids` and `attention_mask` must both be [B, P], got "
            f"{list(prompt_ids.shape)} and {list(attention_mask.shape)}."
        )
    if num_generations < 1:
        raise InvalidRequestError(f"`num_generations` must be 1 or more, got {num_generations}.")
    prompts = [
        ids[mask.bool()].tolist() for ids, mask in zip(prompt_ids, attention_mask, strict=True)
    ]
    return [prompt for prompt in prompts for _ in range(num_generations)]


def to_tensors(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: torch.Tensor,  # [B, P]
    rows: Sequence[Sequence[int]],  # [B*G]
    completions: Sequence[Completion],  # [B*G]
) -> RolloutResult:
    """Pad the completions and put them behind the prompts as they were given."""
    device = prompt_ids.device
    token_ids = [completion.token_ids for completion in completions]
    completion_ids = pad_rows(token_ids, pad_token_id(tokenizer)).to(device)
    prompts = prompt_ids.repeat_interleave(len(rows) // len(prompt_ids), dim=0)
    return RolloutResult(
        output_ids=torch.cat([prompts, completion_ids], dim=1),
        completion_ids=completion_ids,
        per_token_logps=pad_rows([c.logprobs for c in completions], 0.0).to(device),
        completion_mask=pad_rows([[1] * len(ids) for ids in token_ids], 0).to(device),
        prompt_lens=torch.tensor([len(row) for row in rows], device=device),
        completions=tokenizer.batch_decode(token_ids, skip_special_tokens=True),
    )
