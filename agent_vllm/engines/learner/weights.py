"""Read a learner's weights under their plain names, as one value per sync.

Owns the way from any supported learner to `(name, tensor)`, and the check of names and shapes.
Loading them is each engine's own. A learner may be wrapped by DDP, DeepSpeed, `torch.compile` and
checkpoint wrappers in any order, sharded by FSDP2 or ZeRO-3, and adapted by PEFT. Invariant: the
learner is only read, and at most one tensor is whole at a time (one layer, if weights are merged
or packed).
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from functools import cached_property
from typing import TypeVar

import torch

from agent_vllm.engines.learner import peft
from agent_vllm.engines.learner.names import checkpoint_units
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
TensorsT = TypeVar("TensorsT", bound=Mapping[str, torch.Tensor])


class LearnerWeights:
    """Read the weights of a learner as it is now. Build a new one for each sync.

    If the learner is sharded, reading values is a collective call: every rank must iterate, in the
    same order. A rank that needs no values calls `join_gathers`. An iterator that is closed early
    gathers the rest, so that no rank is left waiting (use `contextlib.closing`). Names and shapes
    need no collective call.

    Args:
        model: the learner, with whatever wraps, shards or adapts it.
        dtype: matrices are handed out in this one, as the engine will hold them; default is their
            own. Vectors stay as they are: they are small, and engines keep some in float32.

    Attributes:
        model: the transformers model inside all wrappers.
        num_bytes_read: bytes of the tensors handed out so far.

    Raises:
        WeightSyncError: the learner has no plain weights: FSDP1 or prompt tuning; and, once names
            or values are asked for, quantised weights.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
        self.model = peft.plain_model(model)
        self._dtype = dtype
        self.num_bytes_read = 0

    # ---- what kind of learner it is ----

    @cached_property
    def is_sharded(self) -> bool:
        """Return whether reading or running the model is a collective call."""
        return is_sharded(self.model)

    @cached_property
    def is_quantised(self) -> bool:
        """Return whether the base weights are quantised, so an engine can't replace them."""
        has_integers = any(not p.is_floating_point() for p in self.model.parameters())
        return has_integers or getattr(self.model.config, "quantization_config", None) is not None

    @cached_property
    def why_not_adapter_only(self) -> str | None:
        """Return why the adapter alone does not describe what is trained, or None if it does."""
        return peft.why_not_adapter_only(self.model)

    @cached_property
    def adapter_rank(self) -> int | None:
        """Return the LoRA adapter's largest rank, or None if the adapter alone can't be sent."""
        return None if self.why_not_adapter_only else peft.adapter_rank(self.model)

    # ---- names, shapes and types; no collective call ----

    @cached_property
    def meta(self) -> dict[str, torch.Tensor]:
        """Map checkpoint name to a meta tensor of the global shape, in the order of `tensors`."""
        return {
            name: tensor
            for unit in self._units
            for name, tensor in self._all_cast(unit.meta).items()
        }

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Map checkpoint name to global shape."""
        return {name: tensor.shape for name, tensor in self.meta.items()}

    @property
    def module_meta(self) -> dict[str, torch.Tensor]:
        """Return `meta` under the names of the model's own modules."""
        return {name: tensor for unit in self._module_units for name, tensor in unit.meta.items()}

    # ---- values ----

    def tensors(self, *, merged: bool = True) -> NamedTensors:
        """Iterate over the weights under the names of the model's checkpoint.

        A tied head comes under both names, because an engine that holds its head apart would
        silently keep the old one. Packed experts come one by one. Tensors that are not sharded,
        merged, converted or cast share storage with the model.

        Args:
            merged: merge the adapters into copies; False yields the base weights.
        """
        return _started(self._read(self._units, merged))

    def module_tensors(self) -> NamedTensors:
        """Iterate over the weights under the names of the model's own modules, adapters merged."""
        return _started(self._read(self._module_units, True))

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """Return the active LoRA adapter alone; see `peft.adapter_tensors`."""
        return self._counted(peft.adapter_tensors(self.model))

    def join_gathers(self) -> None:
        """Take part in gathering `tensors` on a rank that needs no values."""
        if self.is_sharded:
            deque(self.tensors(), maxlen=0)  # keeps none

    # ---- units ----

    @cached_property
    def _units(self) -> list[WeightUnit]:
        return checkpoint_units(self.model, self._module_units)

    @cached_property
    def _module_units(self) -> list[WeightUnit]:
        if self.is_quantised:
            raise WeightSyncError(
                "The learner's base weights are quantised, and an engine's can't be replaced by "
                "such. Build the engine from the checkpoint's path and train a LoRA adapter, which "
                "is then sent by itself; or load the learner without quantisation."
            )
        reshard(self.model)
        return list(_walk(self.model))

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        is_cast = self._dtype is not None and tensor.is_floating_point() and tensor.dim() > 1
        return tensor.to(self._dtype) if is_cast else tensor

    def _all_cast(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._cast(tensor) for name, tensor in tensors.items()}

    def _counted(self, tensors: TensorsT) -> TensorsT:
        self.num_bytes_read += sum(tensor.nbytes for tensor in tensors.values())
        return tensors

    def _read(self, units: list[WeightUnit], merged: bool) -> NamedTensors:
        remaining = iter(units)
        try:
            yield "", torch.empty(0)  # for `_started`
            for unit in remaining:
                yield from self._counted(self._all_cast(unit.read(merged))).items()
        finally:
            if self.is_sharded:
                for unit in remaining:
                    unit.read(merged)


def check_shapes(expected: Mapping[str, torch.Size], given: Mapping[str, torch.Size]) -> None:
    """Check that every expected tensor is given, with its shape, and no other.

    Raises:
        WeightSyncError: lists the names.
    """
    if given == expected:
        return
    missing = sorted(expected.keys() - given.keys())
    unknown = sorted(given.keys() - expected.keys())
    wrong = [
        f"{name}: {list(given[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    raise WeightSyncError(
        "The learner's weights don't fit the engine's model. "
        f"Missing: {missing or 'none'}. Unknown: {unknown or 'none'}. "
        f"Wrong shape: {wrong or 'none'}. Build the engine from this learner."
    )


def _started(tensors: NamedTensors) -> NamedTensors:
    """Enter the iterator's `try`, so that closing it before the first tensor gathers all."""
    next(tensors)
    return tensors


def _walk(module: torch.nn.Module, prefix: str = "") -> Iterator[WeightUnit]:
    """Yield units in the order of `state_dict`."""
    module = unwrapped(module)
    if peft.is_adapted(module):
        yield from peft.adapted_units(module, prefix, _walk)
        return
    for name, tensor in own_tensors(module).items():
        yield tensor_unit(prefix + name, tensor)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")
