"""Extend vLLM's worker in a `vllm serve` process (`--worker-extension-cls`).

Owns the worker's end of a weight update through memory of the trainer's process. The worker imports
it before it builds its model. Invariant: an update that leaves a layer with old weights fails.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from agent_vllm.engines.models import gpu_id, model_sizes
from agent_vllm.engines.server.weight_transfer import MEMORY_BACKEND, STARTED
from agent_vllm.engines.vllm.cpu import skip_rank_compilation


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Hold nothing: there is nothing to set up."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Describe one part of the weights: a file with one after the other, and the offset of each.

    The last one has no weights and says that all were sent.
    """

    path: str = ""
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)  # torch's names, such as "bfloat16"
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # bytes
    is_complete: bool = False


class TrainerMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Read weights from a file in the memory of a trainer on the same machine."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.is_complete:
            self._check_complete()
        else:
            self.model.load_weights(_tensors(update_info))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def _check_complete(self) -> None:
        left_out = [name for name, layer in self.model.named_modules() if _got_nothing(layer)]
        if left_out:
            raise ValueError(f"No weights came for {left_out}; they would stay on their old ones.")

    def shutdown(self) -> None:
        pass


def _tensors(part: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views of the file, which stays mapped while one of them is in use."""
    with open(part.path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    whole = torch.frombuffer(content, dtype=torch.uint8)
    entries = zip(part.names, part.dtypes, part.shapes, part.offsets, strict=True)
    for name, dtype_name, shape, offset in entries:
        dtype = getattr(torch, dtype_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        yield name, whole[offset : offset + size].view(dtype).view(shape)


def _got_nothing(layer: torch.nn.Module) -> bool:
    """Return whether a layer that has weights to load got none."""
    has_weights = next(layer.parameters(recurse=False), None) is not None
    if not has_weights or is_deferred_attention_layer(layer):
        return False
    info = get_layerwise_info(layer)
    return info.can_load() and info.load_numel <= 0


class _WeightsName:
    """Name a model's weights, until anybody loads others, by whatever route."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.value: str | None = STARTED
        load = model.load_weights

        def load_and_forget(*args: Any, **kwargs: Any) -> Any:
            self.value = None
            return load(*args, **kwargs)  # type: ignore[operator]

        model.load_weights = load_and_forget  # type: ignore[assignment]


class WorkerExtension:
    """Add methods to the worker. Importing this module registers the weight transfer."""

    @property
    def _weights_name(self) -> _WeightsName:
        own = vars(self)
        if "_named" not in own:
            own["_named"] = _WeightsName(self.get_model())  # type: ignore[attr-defined]
        return own["_named"]

    def model_sizes(self) -> dict[str, Any]:
        """Return the served model's sizes, as `models.model_sizes` does for the learner."""
        return model_sizes(self.model_config.hf_config)  # type: ignore[attr-defined]

    def gpu_id(self) -> str | None:
        """Return what identifies this worker's GPU on its machine, or None on a CPU."""
        return gpu_id(self.device)  # type: ignore[attr-defined]

    def name_weights(self, name: str) -> None:
        """Name the weights as they are now."""
        self._weights_name.value = name

    def weights_name(self) -> str | None:
        """Return the weights' name, or None if they were changed since they got one."""
        return self._weights_name.value


if MEMORY_BACKEND not in WeightTransferEngineFactory._registry:  # imported again in a forked worker
    WeightTransferEngineFactory.register_engine(MEMORY_BACKEND, TrainerMemoryEngine)
if current_platform.is_cpu():
    skip_rank_compilation()
