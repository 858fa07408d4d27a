"""Describe the model that an engine is built from, before it is built.

Owns `ModelSource`. Invariant: no weights are read.
"""

from collections import Counter
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
from agent_vllm.engines.learner.weights import LearnerWeights
from agent_vllm.engines.models import end_token_ids, merge_end_token_ids


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Describe an engine's model before the engine is built."""

    path: str | None  # None: built from the config; weights follow
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
    """Describe a model object, a path or an id, without reading weights.

    Raises:
        ValueError: a model object was given without its tokenizer.
    """
    if isinstance(model, str | Path):
        return _checkpoint_source(model, tokenizer)
    if tokenizer is None:
        raise ValueError("`tokenizer` must be given with a model object, got None.")
    weights = LearnerWeights(model)
    plain = weights.model
    return ModelSource(
        path=None,
        config=own_config(plain),
        tokenizer=tokenizer,
        dtype=_common_dtype(weights),
        head_dtype=_head_dtype(plain),
        vocab_size=vocabulary_size(plain),
        eos_token_ids=end_token_ids(plain, tokenizer),
        shapes=weights.shapes,
    )


def _checkpoint_source(model: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> ModelSource:
    config = AutoConfig.from_pretrained(model)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    weights = LearnerWeights(skeleton)
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
        shapes={} if weights.is_quantised else weights.shapes,
    )


def _common_dtype(weights: LearnerWeights) -> torch.dtype:
    """Return the dtype of most weights: a head, norms or adapters may have a finer one."""
    dtypes = [tensor.dtype for tensor in weights.module_meta.values()]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return Counter(floats).most_common(1)[0][0]


def _head_dtype(model: PreTrainedModel) -> torch.dtype:
    head: Any = model.get_output_embeddings() or model.get_input_embeddings()
    return head.weight.dtype


def own_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of the config that describes the model as it is now."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [plain_class(model).__name__]
    if not is_tied(model):  # an adapter on the embedding, or a trained copy of the head
        config.tie_word_embeddings = False
    return config


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return how many ids the model's embedding has."""
    return on_meta(cast(torch.nn.Embedding, model.get_input_embeddings()).weight).shape[0]
