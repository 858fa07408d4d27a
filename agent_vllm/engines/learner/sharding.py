"""Read single tensors of a wrapped or sharded learner: global shapes and gathered values.

Owns what is specific to DDP, FSDP2, DeepSpeed ZeRO-3, `torch.compile` and checkpoint wrappers.
Invariant: the learner is only read, and at most one of its tensors is gathered at a time.

FSDP2 is tested with two gloo processes on a CPU. DeepSpeed is tested against a stand-in for
`ds_shape` and `GatheredParameters` only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agent_vllm.errors import WeightSyncError

_WRAPPED = ("module", "_orig_mod", "_checkpoint_wrapped_module")
_FSDP1_WRAPPED = "_fsdp_wrapped_module"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightUnit:
    """Hold weights that are read together: usually one tensor, with its name.

    Attributes:
        meta: name to a meta tensor of the global shape.
        read: return the values under the same names. The argument says whether adapters are merged
            into them. A collective call if the learner is sharded.
    """

    meta: dict[str, torch.Tensor]
    read: Callable[[bool], Mapping[str, torch.Tensor]]


def tensor_unit(name: str, tensor: torch.Tensor) -> WeightUnit:
    """Return the unit of one plain tensor."""
    return WeightUnit(meta={name: on_meta(tensor)}, read=lambda _: {name: full_tensor(tensor)})


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP, DeepSpeed, `torch.compile` and checkpoint wrappers.

    A wrapper has one child, with a wrapper's name, and no tensor of its own.

    Raises:
        WeightSyncError: the learner uses FSDP1, whose flat parameters can't be gathered one by one.
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
    """Return a module's own parameters and persistent buffers, as in `state_dict`."""
    tensors = {**module._parameters, **module._buffers}
    skipped = module._non_persistent_buffers_set
    return {k: t for k, t in tensors.items() if t is not None and k not in skipped}


def plain_class(module: torch.nn.Module) -> type:
    """Return the module's class as it was before FSDP2 replaced it."""
    classes = type(module).__mro__
    return next(c for c in classes if not any(base.__name__ == "FSDPModule" for base in c.__mro__))


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether reading or running the model is a collective call."""
    return any(_is_dtensor(p) or _is_zero3(p) for p in model.parameters())


def reshard(model: torch.nn.Module) -> None:
    """Make FSDP2 drop parameters gathered for a forward pass; the optimizer updates the shards."""
    for module in model.modules():
        if plain_class(module) is not type(module):
            module.reshard()  # type: ignore[operator]


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same global shape and dtype, without a collective call."""
    shape = tensor.ds_shape if _is_zero3(tensor) else tensor.shape  # type: ignore[attr-defined]
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


@torch.no_grad()
def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor without gradients; it shares storage unless it is sharded."""
    if _is_zero3(tensor):
        import deepspeed  # type: ignore[import-not-found]

        # On leaving, DeepSpeed gives the parameter another storage and leaves this one alone.
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.data.detach()
    if _is_dtensor(tensor):
        return _gathered(tensor.detach())
    return tensor.detach()


def _gathered(tensor: Any) -> torch.Tensor:
    # offloaded shards are gathered on this thread's GPU, which is the learner's
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _is_zero3(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "ds_id")
