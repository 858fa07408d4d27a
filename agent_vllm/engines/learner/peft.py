"""Read PEFT learners: the weights of the merged model, and the adapter alone.

Owns everything specific to PEFT. Merging is out of place: PEFT's own layer merges a twin whose
tensors are copies. Invariant: the learner's base weights stay bit-identical, and the learner stays
unmerged.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from agent_vllm.engines.learner.sharding import WeightUnit, full_tensor, plain_class, unwrapped
from agent_vllm.errors import WeightSyncError

Walk = Callable[[torch.nn.Module, str], Iterator[WeightUnit]]


def plain_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside all wrappers, PEFT's included.

    Raises:
        WeightSyncError: the adapter does not change weights (prompt tuning), or FSDP1 is used.
    """
    model = unwrapped(model)
    while _is_peft("PeftModel", model):
        for name in model.active_adapters:
            config = model.peft_config[name]
            if config.is_prompt_learning or config.is_adaption_prompt:
                raise WeightSyncError(
                    f"The adapter {name!r} is of type {config.peft_type.value}, which is no change "
                    "of weights, so an engine can't be given it. Use LoRA."
                )
        model = unwrapped(model.get_base_model())
    return model


def is_adapted(module: torch.nn.Module) -> bool:
    """Return whether this module is a PEFT wrapper around one of the model's modules."""
    return _is_peft("tuners.tuners_utils.BaseTunerLayer", module) or _is_peft(
        "utils.AuxiliaryTrainingWrapper", module
    )


def adapted_units(module: Any, prefix: str, walk: Walk) -> Iterator[WeightUnit]:
    """Yield an adapted module's weights under the plain module's names.

    Args:
        walk: yields the units of a module inside it.

    Raises:
        WeightSyncError: PEFT can't express the module as weights.
    """
    if _is_peft("utils.ModulesToSaveWrapper", module):
        yield from walk(_in_use(module), prefix)
    elif _is_peft("utils.AuxiliaryTrainingWrapper", module):
        raise WeightSyncError(
            f"{prefix[:-1]} is wrapped in {type(module).__name__}, which is not supported. Train "
            "it whole (`modules_to_save`) or by LoRA."
        )
    elif module.disable_adapters or not _unmerged(module):
        yield from walk(module.get_base_layer(), prefix)
    else:
        yield _mergeable_unit(module, prefix, walk)


def _mergeable_unit(layer: Any, prefix: str, walk: Walk) -> WeightUnit:
    base = list(walk(layer.get_base_layer(), prefix))

    def read(merged: bool) -> dict[str, torch.Tensor]:
        return _merged(layer, prefix, walk) if merged else _values(base)

    meta = {name: tensor for unit in base for name, tensor in unit.meta.items()}
    return WeightUnit(meta=meta, read=read)


def _values(units: Iterable[WeightUnit]) -> dict[str, torch.Tensor]:
    return {name: tensor for unit in units for name, tensor in unit.read(True).items()}


def _in_use(wrapper: Any) -> torch.nn.Module:
    """Return the copy that the wrapper's forward runs: the active adapter's or the original."""
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    if wrapper.disable_adapters or not active:
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def runs_as_reference(model: torch.nn.Module) -> bool:
    """Return whether the model now runs as TRL's reference: adapter off, or its frozen copy on."""
    layers = [layer for _, layer in _adapted_modules(plain_model(model))]
    return any(layer.disable_adapters or layer.active_adapters == ["ref"] for layer in layers)


def is_tied(model: Any) -> bool:
    """Return whether the head and the embedding share a weight, adapters considered."""
    plain: Any = plain_model(model)
    embedding, head = plain.get_input_embeddings(), plain.get_output_embeddings()
    return head is not None and _weight(embedding) is _weight(head)


def _weight(module: Any) -> object:
    module = unwrapped(module)
    if _is_peft("utils.ModulesToSaveWrapper", module):
        module = _in_use(module)
    if is_adapted(module):
        return object() if _unmerged(module) else module.get_base_layer().weight
    return module.weight


def _unmerged(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name not in layer.merged_adapters]


@torch.no_grad()
def _merged(layer: Any, prefix: str, walk: Walk) -> dict[str, torch.Tensor]:
    twin, chain = _twin(layer), []
    inner: Any = twin
    while is_adapted(inner):  # PEFT nests layers that adapt several parameters of one module
        chain.append(inner)
        inner = inner.base_layer
    for each in reversed(chain):
        each.merge(adapter_names=_unmerged(each))
    return _values(walk(inner, prefix))


def _twin(module: torch.nn.Module) -> Any:
    """Return the module over whole copies of its tensors, sharing none with the learner."""
    twin = object.__new__(plain_class(module))
    twin.__dict__.update(
        {k: copy.copy(v) if type(v) in (dict, list, set) else v for k, v in vars(module).items()}
    )
    twin._modules = {k: child and _twin(child) for k, child in module._modules.items()}
    twin._parameters = {
        k: p if p is None else torch.nn.Parameter(_copy(p), requires_grad=False)
        for k, p in module._parameters.items()
    }
    twin._buffers = {k: b if b is None else _copy(b) for k, b in module._buffers.items()}
    return twin


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    whole = full_tensor(tensor)
    return whole.clone() if whole.data_ptr() == tensor.data_ptr() else whole


# ---- the adapter alone ----


def why_not_adapter_only(model: torch.nn.Module) -> str | None:
    """Return why the adapter alone does not describe what is trained, or None if it does."""
    base = plain_model(model)
    layers = dict(_adapted_modules(base))
    if not layers:
        return "it has no adapter"
    lora: set[int] = set()
    for name, layer in layers.items():
        reason = _why_no_lora(layer)
        if reason is not None:
            return f"{name} {reason}"
        lora |= {id(p) for p in _lora_parameters(layer)}
    trained = [name for name, p in base.named_parameters() if p.requires_grad and id(p) not in lora]
    return f"{trained[0]} is trained beside the adapter" if trained else None


def _why_no_lora(layer: Any) -> str | None:
    if not _is_peft("tuners.lora.LoraLayer", layer) or not hasattr(layer, "lora_A"):
        return f"is adapted by {type(layer).__name__}, which is no LoRA"
    if not isinstance(layer.get_base_layer(), torch.nn.Linear) or hasattr(layer, "parameter_name"):
        return f"is a {type(layer.get_base_layer()).__name__}, no linear layer"
    if layer.disable_adapters or layer.merged:
        return "has its adapter merged or disabled"
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1:
        return f"has {len(active)} active adapters"
    if active[0] in layer.lora_variant:
        return f"is adapted by {type(layer.lora_variant[active[0]]).__name__}"
    return "has a trained bias" if layer.lora_bias[active[0]] else None


def _lora_parameters(layer: Any) -> list[torch.nn.Parameter]:
    (active,) = (name for name in layer.active_adapters if name in layer.lora_A)
    return [layer.lora_A[active].weight, layer.lora_B[active].weight]


def adapter_rank(model: torch.nn.Module) -> int:
    """Return the largest rank of the active LoRA adapter, without a collective call."""
    layers = [layer for _, layer in _adapted_modules(plain_model(model))]
    return max(layer.r[name] for layer in layers for name in layer.active_adapters)


def adapter_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the active LoRA adapter. A collective call if the learner is sharded.

    Returns:
        Copies of `<layer>.lora_A.weight` `[r, in]` and `<layer>.lora_B.weight` `[out, r]` under the
        base model's plain names. B includes the layer's scaling.

    Raises:
        WeightSyncError: more than the adapter is trained, or it is not plain LoRA.
    """
    reason = why_not_adapter_only(model)
    if reason is not None:
        raise WeightSyncError(
            f"The adapter can't be sent by itself: {reason}. Send the merged weights "
            '(`adapter_sync="merged"`).'
        )
    tensors = {}
    for name, layer in _adapted_modules(plain_model(model)):
        (active,) = (key for key in layer.active_adapters if key in layer.lora_A)
        a, b = (full_tensor(p) for p in _lora_parameters(layer))
        tensors[f"{name}.lora_A.weight"] = a.clone()  # the engine keeps it
        tensors[f"{name}.lora_B.weight"] = b * layer.scaling[active]
    return tensors


def _adapted_modules(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the adapted modules with their plain names."""
    module = unwrapped(module)
    if is_adapted(module):
        yield prefix[:-1], module
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _adapted_modules(child, f"{prefix}{name}.")


def _is_peft(path: str, module: object) -> bool:
    """Return whether the object is of that PEFT class, without importing PEFT."""
    found: Any = sys.modules.get("peft")
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is not None and isinstance(module, found)
