"""Change vLLM's CPU path for speed: compiling, sampling noise, weights of small models.

Invariant: tokens and logprobs are those of an unchanged vLLM, except for the noise, which is that
of `sampling_noise`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedConfig

from agent_vllm.engines.models import head_size
from agent_vllm.engines.sampling_noise import NoiseStream, draw_noise, noise_stream
from agent_vllm.errors import UnsupportedModelError

UNPACKED_LIMIT = 16 << 20
"""Bytes of weights of a small model. Measured: up to this size sampling is as fast without packing,
and a sync takes a quarter of the time. At 77 MiB sampling is 3 % (64 rows) to 37 % (8) slower."""


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def check_head_size(config: PreTrainedConfig) -> None:
    """Check that vLLM's CPU attention has the model's head size.

    Raises:
        UnsupportedModelError: names the size and those that it has.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, sizes = head_size(config), CPUAttentionBackend.get_supported_head_sizes()
    uses_latents = hasattr(config.get_text_config(), "kv_lora_rank")  # its heads are not cached
    if size not in sizes and not uses_latents:
        raise UnsupportedModelError(
            f"The model's attention heads must have a size of {sizes} for vLLM on a CPU, got "
            f'{size}. Use the torch engine (rollout_engine="torch").'
        )


def skip_rank_compilation() -> None:
    """Skip compiling the rank of a sampled token, which is not read here: it takes 5 to 17 s."""
    from vllm.v1.sample import sampler

    def count(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.count_nonzero((logits >= values).numpy(), axis=-1))

    setattr(sampler, "batched_count_greater_than", count)  # noqa: B010 - not a public name


def draw_our_noise(llm: Any) -> None:
    """Draw noise once per row. vLLM draws it for all rows and again for seeded ones.

    All requests here are seeded. Rows without a generator are greedy: vLLM ignores their draw.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    streams: WeakKeyDictionary[torch.Generator, NoiseStream] = WeakKeyDictionary()

    def sample(
        logits: torch.Tensor,  # [B, V]
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = apply_top_k_top_p(logits, k, p)
        in_rows: list[NoiseStream | None] = [None] * len(logits)
        for row, generator in generators.items():
            if generator not in streams:
                streams[generator] = noise_stream(generator.initial_seed(), logits.device)
            in_rows[row] = streams[generator]
        noise = draw_noise(in_rows, logits.shape[-1], logits.device)
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        chosen = logits.softmax(-1, dtype=torch.float32).div_(noise)
        return torch.from_numpy(chosen.numpy().argmax(-1)), logprobs  # a tenth of torch's time

    _runner(llm).sampler.topk_topp_sampler.forward = sample


# ---- weights of small models ----


def is_small(shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> bool:
    """Return whether the weights have at most `UNPACKED_LIMIT` bytes."""
    return sum(shape.numel() for shape in shapes.values()) * dtype.itemsize <= UNPACKED_LIMIT


@contextmanager
def unpacked_weights() -> Iterator[None]:
    """Keep the weights of linear layers built in this block as they are loaded.

    vLLM would pack them for its matmuls, and again at every sync.
    """
    from vllm.model_executor.layers import utils

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010 - no module or tensor

    original = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original


def is_unpacked(llm: Any) -> bool:
    """Return whether the linear layers keep their weights as they are loaded."""
    modules = _runner(llm).get_model().modules()
    linears = [module.cpu_linear for module in modules if hasattr(module, "cpu_linear")]
    return bool(linears) and all(linear is torch.nn.functional.linear for linear in linears)


def is_plain(llm: Any) -> bool:
    """Return whether all layers are unquantised linear layers and embeddings, without adapters."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    methods = [getattr(m, "quant_method", None) for m in _runner(llm).get_model().modules()]
    plain = UnquantizedLinearMethod | UnquantizedEmbeddingMethod
    quantised = [m for m in methods if isinstance(m, QuantizeMethodBase)]
    return llm.vllm_config.lora_config is None and all(isinstance(m, plain) for m in quantised)


def load_unpacked(llm: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy weights into an `is_unpacked` and `is_plain` model; redo what depends on them."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = _runner(llm).get_model()
    model.load_weights(weights)
    with unpacked_weights(), torch.inference_mode():
        process_weights_after_loading(model, llm.model_config, torch.device("cpu"))


def _runner(llm: Any) -> Any:
    return llm.model_executor.driver_worker.model_runner
