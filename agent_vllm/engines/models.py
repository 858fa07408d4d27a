"""What engines need of a model besides its weights: its sizes, its end tokens, its modes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def vocabulary_size(model: PreTrainedModel) -> int:
    """Ids that the model's embedding can look up."""
    return cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0]


def context_length(config: Any) -> int:
    """Tokens that the model's positions allow for.

    Raises:
        ValueError: the config doesn't say.
    """
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise ValueError(
            "The model's config has no `max_position_embeddings`; give `max_model_len`."
        )
    return length


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the tokenizer's, and those of the generation config."""
    generation_config = getattr(model, "generation_config", None)
    return merge_end_token_ids(
        tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)
    )


def merge_end_token_ids(*groups: Any) -> list[int]:
    """One list without repeats, from single ids, lists and None."""
    ids: list[int] = []
    for group in groups:
        ids += [] if group is None else [group] if isinstance(group, int) else group
    return list(dict.fromkeys(ids))


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's pad id; where it has none its end token, as padding is told by masks."""
    pad_id = tokenizer.pad_token_id
    return cast(int, tokenizer.eos_token_id if pad_id is None else pad_id)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode without gradients; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
