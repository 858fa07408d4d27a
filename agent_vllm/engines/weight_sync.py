"""A learner's weights under their plain names.

Owns the way from any supported learner to `(name, tensor)` and the accounting of names and shapes;
loading them is each engine's own. Invariant: the learner is only read.
"""

from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel

from agent_vllm.errors import WeightSyncError

_WRAPPERS = frozenset({"module", "_orig_mod"})


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The learner's weights with their checkpoint names, tied ones under each of their names.

    The alias of a tied head is kept: an engine that holds its head apart would silently stay on the
    old one. Wrappers of DDP and `torch.compile` are taken off the names. Tensors share storage with
    the model.

    Raises:
        WeightSyncError: the model holds adapters, which have to be merged first.
    """
    if hasattr(model, "peft_config"):
        raise WeightSyncError(
            "The learner is a PEFT model; syncing adapters is not supported yet. Train without "
            "`peft_config`, or merge the adapter (`model.merge_and_unload()`) first."
        )
    return ((_plain_name(name), tensor.detach()) for name, tensor in model.state_dict().items())


def check_weights(expected: Mapping[str, torch.Size], given: Mapping[str, torch.Size]) -> None:
    """Every expected tensor is there, in shape, and no other.

    Raises:
        WeightSyncError: lists the names.
    """
    missing = sorted(expected.keys() - given.keys())
    unknown = sorted(given.keys() - expected.keys())
    wrong = [
        f"{name}: {list(given[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    if missing or unknown or wrong:
        raise WeightSyncError(
            "The learner's weights don't fit the engine's model. "
            f"Missing: {missing or 'none'}. Unknown: {unknown or 'none'}. "
            f"Wrong shape: {wrong or 'none'}. Build the engine from this learner."
        )


def weight_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Names and shapes of `named_weights`, without the values."""
    return {name: tensor.shape for name, tensor in named_weights(model)}


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
