"""PEFT adapters: the weights of the merged model, and the adapter by itself.

Owns all that is known of PEFT here. Merging is out of place: PEFT's own layer does it on a twin
whose tensors are copies. Invariant: the learner's base weights are bit-identical afterwards, and
it is as unmerged as it was.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from agent_vllm.engines.learner.sharding import WeightUnit, full_tensor, plain_class, unwrapped
from agent_vllm.errors import WeightSyncError

Walk = Callable[[torch.nn.Module, str], Iterator[WeightUnit]]


def base_model(model: Any) -> torch.nn.Module:
    """The plain model inside of wrappers and PEFT's.

    Raises:
        WeightSyncError: the adapter is no change of weights, as with prompt tuning.
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


def has_adapters(model: torch.nn.Module) -> bool:
    return any(is_adapted(module) for module in model.modules())


def is_adapted(module: torch.nn.Module) -> bool:
    """Whether PEFT has put this module around one of the model's."""
    return _is_peft("tuners.tuners_utils.BaseTunerLayer", module) or _is_peft(
        "utils.AuxiliaryTrainingWrapper", module
    )


def adapted_units(
    module: Any, prefix: str, walk: Walk, *, merged: bool = True
) -> Iterator[WeightUnit]:
    """What an adapted module comes to under the plain module's name.

    Args:
        walk: the units of a module inside of it.
        merged: with the active adapters, or the base alone.

    Raises:
        WeightSyncError: PEFT can't say it as weights.
    """
    if _is_peft("utils.ModulesToSaveWrapper", module):
        yield from walk(_in_use(module), prefix)
    elif _is_peft("utils.AuxiliaryTrainingWrapper", module):
        raise WeightSyncError(
            f"{prefix[:-1]} is wrapped in {type(module).__name__}, which is not supported. Train "
            "it whole (`modules_to_save`) or by LoRA."
        )
    elif not merged or module.disable_adapters or not _unmerged(module):
        yield from walk(module.get_base_layer(), prefix)
    else:
        base = list(walk(module.get_base_layer(), prefix))
        meta = {name: tensor for unit in base for name, tensor in unit.meta.items()}
        yield WeightUnit(meta=meta, read=lambda: _merged(module, prefix, walk))


def _in_use(wrapper: Any) -> torch.nn.Module:
    """The copy that the wrapper's forward runs: the active adapter's, or else the original."""
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    if wrapper.disable_adapters or not active:
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def runs_as_reference(model: torch.nn.Module) -> bool:
    """Whether the trained adapter is switched off for TRL's reference model, or its copy on."""
    layers = [layer for _, layer in _adapted_modules(base_model(model))]
    return any(layer.disable_adapters or layer.active_adapters == ["ref"] for layer in layers)


def is_tied(model: Any) -> bool:
    """Whether the model's head is its embedding, as it stands with its adapters."""
    plain: Any = base_model(model)
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
    return {name: tensor for unit in walk(inner, prefix) for name, tensor in unit.read().items()}


def _twin(module: torch.nn.Module) -> Any:
    """The same module over whole copies of its tensors, bound to nothing of the learner's."""
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


# ---- the adapter by itself ----


def why_not_alone(model: torch.nn.Module) -> str | None:
    """Why the learner can't be told by its base and a LoRA adapter; None where it can."""
    base = base_model(model)
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
    """The largest rank of the active LoRA adapter; no collective call."""
    layers = [layer for _, layer in _adapted_modules(base_model(model))]
    return max(layer.r[name] for layer in layers for name in layer.active_adapters)


def adapter_alone(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The active LoRA adapter by itself; a collective call where the learner is sharded.

    Returns:
        Copies of `<layer>.lora_A.weight` `[r, in]` and `<layer>.lora_B.weight` `[out, r]` by the
        base model's plain names; each layer's scaling is in its B.

    Raises:
        WeightSyncError: the adapter is not all that is trained, or no plain LoRA.
    """
    reason = why_not_alone(model)
    if reason is not None:
        raise WeightSyncError(
            f"The adapter can't be sent by itself: {reason}. Send the merged weights "
            '(`adapter_sync="merged"`).'
        )
    tensors = {}
    for name, layer in _adapted_modules(base_model(model)):
        (active,) = (key for key in layer.active_adapters if key in layer.lora_A)
        a, b = (full_tensor(p) for p in _lora_parameters(layer))
        tensors[f"{name}.lora_A.weight"] = a.clone()  # the engine keeps it
        tensors[f"{name}.lora_B.weight"] = b * layer.scaling[active]
    return tensors


def _adapted_modules(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Adapted modules by their plain names."""
    module = unwrapped(module)
    if is_adapted(module):
        yield prefix[:-1], module
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _adapted_modules(child, f"{prefix}{name}.")


def _is_peft(path: str, module: object) -> bool:
    """Whether the object is of that class of PEFT's; PEFT is loaded if one is."""
    found: Any = sys.modules.get("peft")
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is not None and isinstance(module, found)
