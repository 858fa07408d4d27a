"""Read what engines need of a model besides its weights: sizes, end tokens, modes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import LinearAttentionCacheLayerMixin

_ENGINE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def context_length(config: Any) -> int:
    """Return how many tokens the model's positions allow.

    Raises:
        ValueError: the config doesn't name a limit.
    """
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise ValueError(
            "The model's config has no `max_position_embeddings`; give `max_model_len`."
        )
    return length


def head_size(config: Any) -> int:
    """Return the size of one attention head."""
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def is_recurrent(model: PreTrainedModel) -> bool:
    """Return whether layers carry a state from token to token, which padding may leak into."""
    return model._is_stateful or has_recurrent_layers(model.config)


def has_recurrent_layers(config: Any) -> bool:
    """Return whether the config names layers with a state, as in hybrid models."""
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def to_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of an engine's weights by its name, such as "bfloat16"; a dtype stays.

    Raises:
        ValueError: no engine computes in it.
    """
    names = {str(known).removeprefix("torch."): known for known in _ENGINE_DTYPES}
    found = names.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"`dtype` must be one of {list(names)}, got {dtype!r}.")
    return found


def gpu_id(device: torch.device) -> str | None:
    """Return what identifies a GPU in every process, or None for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def own_gpu_id() -> str | None:
    """Return what identifies the GPU that this process uses, or None if it uses none."""
    if not torch.cuda.is_initialized():
        return None
    return gpu_id(torch.device("cuda", torch.cuda.current_device()))


def model_sizes(config: Any) -> dict[str, Any]:
    """Return the sizes that identify a model's shape, under the config's own names."""
    text = config.get_text_config()
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    return {name: getattr(text, name) for name in names if hasattr(text, name)}


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a completion, from the tokenizer and the generation config."""
    generation_config = getattr(model, "generation_config", None)
    return merge_end_token_ids(
        tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)
    )


def merge_end_token_ids(*groups: Any) -> list[int]:
    """Merge single ids, lists and None into one list without repeats."""
    ids: list[int] = []
    for group in groups:
        ids += [] if group is None else [group] if isinstance(group, int) else group
    return list(dict.fromkeys(ids))


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's pad id, or its end token; masks say what is padding."""
    pad_id = tokenizer.pad_token_id
    return cast(int, tokenizer.eos_token_id if pad_id is None else pad_id)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Run in eval mode without gradients, then restore every module's mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
