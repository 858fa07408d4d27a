"""Convert a learner's tensors to the names and shapes of its checkpoint.

transformers packs some weights (a layer's experts into one tensor) and renames others when it loads
a checkpoint; engines read checkpoints. Owns the conversion back, which is the one that
`save_pretrained` uses. Invariant: at most one tensor is held at a time, or one layer where
transformers joins several tensors.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from agent_vllm.engines.learner.sharding import WeightUnit

Tensors = dict[str, torch.Tensor]


def checkpoint_units(model: PreTrainedModel, units: Iterable[WeightUnit]) -> list[WeightUnit]:
    """Return the same weights with the names and shapes of the model's checkpoint."""
    units = list(units)
    before = _joined(units)
    after = revert_weight_conversion(model, before)
    if _shapes(after) == _shapes(before):
        return units
    apart, together = [], defaultdict(list)
    for unit in units:
        if _converts_alone(model, unit, after):
            apart.append([unit])
        else:
            together[_layer(next(iter(unit.meta)))].append(unit)
    return [_converted(model, group) for group in chain(apart, together.values())]


def _converts_alone(model: PreTrainedModel, unit: WeightUnit, whole: Tensors) -> bool:
    try:
        alone = _shapes(revert_weight_conversion(model, dict(unit.meta)))
    except (RuntimeError, ValueError, KeyError, IndexError):  # its companions are missing
        return False
    return alone.items() <= _shapes(whole).items()


def _converted(model: PreTrainedModel, units: list[WeightUnit]) -> WeightUnit:
    def read(merged: bool) -> Tensors:
        values = {name: tensor for unit in units for name, tensor in unit.read(merged).items()}
        return revert_weight_conversion(model, values)

    return WeightUnit(meta=revert_weight_conversion(model, _joined(units)), read=read)


def _joined(units: Iterable[WeightUnit]) -> Tensors:
    return {name: tensor for unit in units for name, tensor in unit.meta.items()}


def _shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _layer(name: str) -> str:
    """Return the name up to its first number, such as `model.layers.3`."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return name if number is None else ".".join(parts[: number + 1])
