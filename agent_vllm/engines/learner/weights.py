"""A learner's weights under their plain names.

Owns the way from any supported learner to `(name, tensor)` and the accounting of names and shapes;
loading them is each engine's own. A learner may be wrapped by DDP, DeepSpeed, `torch.compile` and
checkpoint wrappers in any order, sharded by FSDP2 or ZeRO-3, and adapted by PEFT. Invariant: the
learner is only read, and one tensor (of adapted or packed weights: one layer's) is whole at a time.

Where the learner is sharded, reading values is a collective call: every rank iterates, in the same
order. Names and shapes never are.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from functools import partial

import torch
from transformers import PreTrainedModel

from agent_vllm.engines.learner.names import checkpoint_units
from agent_vllm.engines.learner.peft import adapted_units, base_model, is_adapted
from agent_vllm.engines.learner.sharding import (
    WeightUnit,
    is_sharded,
    own_tensors,
    reshard,
    tensor_unit,
    unwrapped,
)
from agent_vllm.errors import WeightSyncError

NamedTensors = Generator[tuple[str, torch.Tensor], None, None]


def plain_model(model: torch.nn.Module) -> PreTrainedModel:
    """The model inside of all wrappers: whose config and class an engine is built from."""
    return base_model(model)  # type: ignore[return-value]


def is_quantised(model: torch.nn.Module) -> bool:
    """Whether the base weights are in a quantised form, which is loaded but never replaced."""
    plain = plain_model(model)
    has_integers = any(not p.is_floating_point() for p in plain.parameters())
    return has_integers or getattr(plain.config, "quantization_config", None) is not None


def weight_dtypes(model: torch.nn.Module) -> dict[str, torch.dtype]:
    """The base weights' types by the names of the model's own modules."""
    units = _plain_units(model, merged=False)
    return {name: tensor.dtype for unit in units for name, tensor in unit.meta.items()}


def named_weights(model: torch.nn.Module, *, merged: bool = True) -> NamedTensors:
    """The learner's weights as its checkpoint names them, adapters merged or left out.

    A tied head comes under each of its names: an engine that holds its head apart would silently
    stay on the old one. Packed experts come one by one. Tensors that are neither sharded, merged
    nor converted share storage with the model.

    Where the learner is sharded all ranks must iterate, and an iterator that is closed early
    gathers the rest, so that no rank is left waiting (`contextlib.closing`; `join_gathers` where a
    rank needs no values).

    Raises:
        WeightSyncError: the learner has no plain weights: quantised, FSDP1, prompt tuning.
    """
    units = _plain_units(model, merged=merged)
    return _read(checkpoint_units(plain_model(model), units), model)


def module_weights(model: torch.nn.Module) -> NamedTensors:
    """As `named_weights`, by the names of the model's own modules: for a copy of the model."""
    return _read(_plain_units(model), model)


def module_shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    """Names and global shapes of `module_weights`."""
    return {name: t.shape for unit in _plain_units(model) for name, t in unit.meta.items()}


def join_gathers(model: torch.nn.Module) -> None:
    """Take part in the gathering of `named_weights` on a rank whose engine needs no values."""
    if is_sharded(model):
        deque(named_weights(model), maxlen=0)  # keeps none


def weight_shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    """Names and global shapes of `named_weights`, without values and collective calls."""
    units = checkpoint_units(plain_model(model), _plain_units(model))
    return {name: tensor.shape for unit in units for name, tensor in unit.meta.items()}


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


def _plain_units(model: torch.nn.Module, *, merged: bool = True) -> list[WeightUnit]:
    plain = plain_model(model)
    if is_quantised(plain):
        raise WeightSyncError(
            "The learner's base weights are quantised, and an engine's can't be replaced by such. "
            "Build the engine from the checkpoint's path and train a LoRA adapter, which is then "
            "sent by itself; or load the learner without quantisation."
        )
    reshard(plain)
    return list(_units(plain, merged=merged))


def _units(module: torch.nn.Module, prefix: str = "", *, merged: bool) -> Iterator[WeightUnit]:
    """In the order of `state_dict`."""
    module = unwrapped(module)
    if is_adapted(module):
        yield from adapted_units(module, prefix, partial(_units, merged=merged), merged=merged)
        return
    for name, tensor in own_tensors(module).items():
        yield tensor_unit(prefix + name, tensor)
    for name, child in module._modules.items():
        if child is not None:
            yield from _units(child, f"{prefix}{name}.", merged=merged)


def _read(units: list[WeightUnit], model: torch.nn.Module) -> NamedTensors:
    remaining = iter(units)
    try:
        for unit in remaining:
            yield from unit.read().items()
    finally:
        if is_sharded(model):
            for unit in remaining:
                unit.read()
