"""What engines need of a model besides its weights: its sizes, its end tokens, its modes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agent_vllm.engines.learner.peft import is_tied
from agent_vllm.engines.learner.sharding import on_meta, plain_class
from agent_vllm.engines.learner.weights import (
    is_quantised,
    plain_model,
    weight_dtypes,
    weight_shapes,
)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Ids that the model's embedding can look up."""
    return on_meta(cast(torch.nn.Embedding, model.get_input_embeddings()).weight).shape[0]


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


def model_sizes(config: Any) -> dict[str, Any]:
    """What tells a model of one shape from those of others, by the config's own names."""
    text = config.get_text_config()
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    return {name: getattr(text, name) for name in names if hasattr(text, name)}


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


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where an engine's model comes from, and what is known of it before it is built."""

    path: str | None  # None: from the config alone, weights follow
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype  # of most weights
    head_dtype: torch.dtype
    vocab_size: int
    eos_token_ids: list[int]
    shapes: dict[str, torch.Size]


def model_source(
    model: PreTrainedModel | str | Path, tokenizer: PreTrainedTokenizerBase | None
) -> ModelSource:
    """What a model object, or a path or id, says of itself; no weights are read.

    Raises:
        ValueError: a model object without its tokenizer.
    """
    if not isinstance(model, str | Path):
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given with a model object, got None.")
        plain = plain_model(model)
        return ModelSource(
            path=None,
            config=own_config(plain),
            tokenizer=tokenizer,
            dtype=_common_dtype(plain),
            head_dtype=_head_dtype(plain),
            vocab_size=vocabulary_size(plain),
            eos_token_ids=end_token_ids(plain, tokenizer),
            shapes=weight_shapes(plain),
        )
    config = AutoConfig.from_pretrained(model)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    try:
        generation_eos: Any = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # a checkpoint without one
        generation_eos = config.eos_token_id
    return ModelSource(
        path=str(model),
        config=config,
        tokenizer=tokenizer,
        dtype=skeleton.dtype,
        head_dtype=skeleton.dtype,
        vocab_size=vocabulary_size(skeleton),
        eos_token_ids=merge_end_token_ids(tokenizer.eos_token_id, generation_eos),
        shapes={} if is_quantised(skeleton) else weight_shapes(skeleton),
    )


def _common_dtype(model: PreTrainedModel) -> torch.dtype:
    """Of most weights: a head, norms or adapters may be kept in a finer type."""
    floats = [dtype for dtype in weight_dtypes(model).values() if dtype.is_floating_point]
    return Counter(floats).most_common(1)[0][0]


def _head_dtype(model: PreTrainedModel) -> torch.dtype:
    head: Any = model.get_output_embeddings() or model.get_input_embeddings()
    return head.weight.dtype


def own_config(model: PreTrainedModel) -> PreTrainedConfig:
    """A copy of the model's config that says what the model is now."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [plain_class(model).__name__]
    if not is_tied(model):  # an adapter on the embedding, or a trained copy of the head
        config.tie_word_embeddings = False
    return config
