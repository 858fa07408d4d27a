"""Load a LoRA adapter into vLLM from tensors.

vLLM reads adapters from disk; here its worker gets the tensors. Owns the adapter that requests are
sampled with. Invariant: each load has its own name and id, so neither vLLM's adapter slots nor its
prefix cache can serve an older adapter.
"""

import itertools
from collections.abc import Mapping
from typing import Any, get_args

import torch

from agent_vllm.errors import WeightSyncError


def lora_args(rank: int) -> dict[str, Any]:
    """Return arguments of `vllm.EngineArgs` for one adapter of that rank at a time.

    Raises:
        WeightSyncError: the rank is larger than vLLM's largest.
    """
    from vllm.config.lora import MaxLoRARanks

    ranks = [known for known in get_args(MaxLoRARanks) if known >= rank]
    if not ranks:
        raise WeightSyncError(
            f"vLLM takes adapters of rank {max(get_args(MaxLoRARanks))} at most, got {rank}. Send "
            'the merged weights (`adapter_sync="merged"`).'
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(ranks)}


class LoadedAdapter:
    """Keep the adapter of one vLLM engine.

    Attributes:
        request: vLLM's `LoRARequest`, sent with each request; None without an adapter.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._manager = llm.model_executor.driver_worker.model_runner.lora_manager
        self._manager._load_adapter = self._as_vllm_has_it
        self._ids = itertools.count(1)
        self._tensors: dict[str, torch.Tensor] = {}
        self.request: Any = None

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the adapter. No request may be in flight.

        Raises:
            WeightSyncError: vLLM can't adapt one of the layers, or refuses the adapter.
        """
        from vllm.lora.request import LoRARequest

        self.drop()
        number = next(self._ids)
        request = LoRARequest(f"policy-{number}", number, "in memory")
        self._tensors = {f"base_model.model.{name}": t for name, t in tensors.items()}
        loaded = self._llm.add_lora(request)
        self._tensors = {}
        if not loaded:
            raise WeightSyncError("vLLM refused the adapter; its log says why.")
        self.request = request

    def drop(self) -> None:
        """Go back to the base model."""
        if self.request is not None:
            self._llm.remove_lora(self.request.lora_int_id)
        self.request = None

    def _as_vllm_has_it(self, request: Any) -> Any:
        from vllm.lora.peft_helper import PEFTHelper

        manager, adapters = self._manager, self._manager._adapter_manager
        mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
        rank = max(t.shape[0] for name, t in self._tensors.items() if ".lora_A." in name)
        lora = manager._lora_model_cls.from_lora_tensors(
            request.lora_int_id,
            self._tensors,
            # alpha = r: the scaling is in B already, as each layer may have its own
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        known = set(adapters.modules).union(*adapters.packed_modules.values())
        if unknown := sorted(set(lora.loras) - known):
            raise WeightSyncError(
                f"vLLM can't adapt {unknown[0]} (of {len(unknown)} such layers). Send the merged "
                'weights (`adapter_sync="merged"`).'
            )
        return lora
