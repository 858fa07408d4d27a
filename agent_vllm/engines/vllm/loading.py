"""Load weights into a vLLM engine of this process.

Owns what vLLM's reload leaves to its caller: vLLM only logs parameters that were not loaded, and on
CPU it leaves experts unpacked. Invariant: every parameter of vLLM's model is loaded, or it raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from agent_vllm.engines.vllm import cpu
from agent_vllm.errors import WeightSyncError

_HEAD = "lm_head.weight"


def load_into(llm: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load by vLLM's layer-wise reload, or by copying if vLLM has packed nothing.

    Raises:
        WeightSyncError: names the parameters that got no weights.
    """
    model = llm.model_executor.driver_worker.model_runner.get_model()
    if _lacks_tied_head(model, llm.model_config.hf_config):
        weights = (named for named in weights if named[0] != _HEAD)
    names = {_loader_name(name) for name, _ in model.named_parameters()}
    is_unpacked = cpu.is_cpu() and cpu.is_unpacked(llm)
    with _loads_noted(model) as loaded:
        if is_unpacked and cpu.is_plain(llm):
            cpu.load_unpacked(llm, weights)
        else:
            with cpu.unpacked_weights() if is_unpacked else nullcontext():
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if cpu.is_cpu():
        _repack_experts(model)
    missing = sorted(names - loaded)
    if missing:
        raise WeightSyncError(
            f"vLLM loaded none of the learner's weights into {missing}. Its implementation of "
            "this model has other names; use the torch engine."
        )


def _lacks_tied_head(model: Any, config: Any) -> bool:
    """Return whether the head is tied and has no name in vLLM's model, as in Gemma 2."""
    is_tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    return is_tied and not hasattr(model, _HEAD.removesuffix(".weight"))


@contextmanager
def _loads_noted(model: Any) -> Iterator[set[str]]:
    """Collect the names of the parameters that the model's own loader reports as loaded."""
    names: set[str] = set()
    load = model.load_weights

    def load_weights(weights: Any) -> Any:
        loaded = load(weights)
        names.update(loaded)
        return loaded

    model.load_weights = load_weights
    try:
        yield names
    finally:
        model.load_weights = load


def _loader_name(name: str) -> str:
    """Return a parameter's name in vLLM's loaders, without LoRA's and the experts' wrappers."""
    return name.replace(".base_layer.", ".").replace(".routed_experts.", ".")


def _repack_experts(model: Any) -> None:
    """Pack experts again; vLLM does so only when it builds their kernel."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
