"""One tensor of a learner, whole: where it is sharded, its global shape and how it is gathered.

Owns what is particular to DDP, FSDP2, DeepSpeed ZeRO-3, `torch.compile` and checkpoint wrappers.
Invariant: the learner is only read, and no more than one of its tensors is gathered at a time.

FSDP2 is tested with two gloo processes on a CPU. DeepSpeed is not: its calls are tested against a
stand-in for `ds_shape` and `GatheredParameters`.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from agent_vllm.errors import WeightSyncError

_WRAPPED = ("module", "_orig_mod", "_checkpoint_wrapped_module")
_FSDP1_WRAPPED = "_fsdp_wrapped_module"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightUnit:
    """Weights that are read together: most often one tensor, with its name.

    Attributes:
        meta: names with tensors on the meta device, of the global shape.
        read: the values under the same names; a collective call where the learner is sharded.
    """

    meta: dict[str, torch.Tensor]
    read: Callable[[], Mapping[str, torch.Tensor]]


def tensor_unit(name: str, tensor: torch.Tensor) -> WeightUnit:
    return WeightUnit(meta={name: on_meta(tensor)}, read=lambda: {name: full_tensor(tensor)})


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """What is inside of DDP's, DeepSpeed's, `torch.compile`'s and checkpointing's wrappers.

    A wrapper has one child, under a wrapper's name, and no tensor of its own.

    Raises:
        WeightSyncError: FSDP1, whose flat parameters can't be gathered one by one.
    """
    while True:
        names = list(module._modules)
        if names == [_FSDP1_WRAPPED]:
            raise WeightSyncError(
                "FSDP1 is not supported: it holds a layer's weights as one flat tensor. Use FSDP2 "
                "(`fsdp_version: 2` in accelerate's config)."
            )
        is_wrapper = len(names) == 1 and names[0] in _WRAPPED and not own_tensors(module)
        if not is_wrapper:
            return module
        module = getattr(module, names[0])


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and persistent buffers, as `state_dict` has them."""
    tensors = {**module._parameters, **module._buffers}
    skipped = module._non_persistent_buffers_set
    return {k: t for k, t in tensors.items() if t is not None and k not in skipped}


def plain_class(module: torch.nn.Module) -> type:
    """The module's class as it was before FSDP2 replaced it."""
    classes = type(module).__mro__
    return next(c for c in classes if not any(base.__name__ == "FSDPModule" for base in c.__mro__))


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether reading the model's weights, or running it, is a collective call."""
    return any(_is_dtensor(p) or _is_zero3(p) for p in model.parameters())


def reshard(model: torch.nn.Module) -> None:
    """Let FSDP2 drop what it has gathered for a forward pass: its optimizer holds the shards."""
    for module in model.modules():
        if plain_class(module) is not type(module):
            module.reshard()  # type: ignore[operator]


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same global shape and dtype without values; no collective call."""
    shape = tensor.ds_shape if _is_zero3(tensor) else tensor.shape  # type: ignore[attr-defined]
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


@torch.no_grad()
def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, without gradients: the learner's own storage where it isn't sharded."""
    if _is_zero3(tensor):
        import deepspeed  # type: ignore[import-not-found]

        # On leaving, DeepSpeed gives the parameter another storage and leaves this one alone.
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.data.detach()
    if _is_dtensor(tensor):
        return _gathered(tensor.detach())
    return tensor.detach()


def _gathered(tensor: Any) -> torch.Tensor:
    device_type = tensor.device_mesh.device_type  # offloaded shards are gathered where it can be
    with _current_device(device_type):
        return tensor.to(device_type).full_tensor()


def _current_device(device_type: str) -> Any:
    """A thread's current GPU is the first unless it says otherwise, and engines have threads."""
    if device_type != "cuda":
        return nullcontext()
    from accelerate import PartialState

    return torch.cuda.device(PartialState().local_process_index)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _is_zero3(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "ds_id")
