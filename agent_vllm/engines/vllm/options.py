"""Choose vLLM's arguments for a rollout engine, on a CPU or a GPU.

Owns `VLLMOptions`, and which of vLLM's arguments a user may set beside them. Invariant: ids in and
ids out, with logprobs of the sampled distribution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from agent_vllm.engines.models import has_recurrent_layers, head_size
from agent_vllm.engines.vllm.lora import lora_args

_CPU_BLOCK_SIZE = 32  # the smallest that the CPU attention takes; only full blocks are reused
_CPU_KV_CACHE_LIMIT = 1 << 30  # bytes; vLLM zeroes them at start, about 1 s per GiB
_MAX_BATCHED_TOKENS = 8192  # per step; vLLM would take 2048 for an engine that is stepped

# Arguments of `vllm.EngineArgs` with a name of our own.
_OWN_NAMES = {
    "dtype": "dtype",
    "enable_sleep_mode": "sleep_mode",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
}
_FIXED = (
    "generation_config", "load_format", "logprobs_mode", "model", "override_generation_config",
    "runner", "skip_tokenizer_init",
)  # fmt: skip
_RANKS = {  # and the value with which this process is alone
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "distributed_executor_backend": "uni",
    "enable_expert_parallel": False,
    "nnodes": 1,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "tensor_parallel_size": 1,
}
_QUANTISED = ("quantization", "quantization_config")
_SPECULATIVE = ("spec_method", "spec_model", "spec_tokens", "speculative_config")


def check_engine_args(further: Mapping[str, Any], *, is_checkpoint: bool) -> None:
    """Refuse arguments of `vllm.EngineArgs` that an engine in this process can't obey.

    Args:
        is_checkpoint: the weights stay those of a checkpoint, but for an adapter.

    Raises:
        ValueError: names the argument, its value and the way that exists.
    """
    for name, value in further.items():
        way = _way_instead(name, value, is_checkpoint)
        if way is not None:
            raise ValueError(f"`engine_args` must not have the key {name!r}, got {value!r}. {way}")


def _way_instead(name: str, value: Any, is_checkpoint: bool) -> str | None:
    """Return what to do instead of setting the argument, or None if it is obeyed."""
    if name in _OWN_NAMES:
        return f"Pass `{_OWN_NAMES[name]}` to the engine."
    if name in _FIXED:
        return "Rollouts need it as it is."
    if value is None:
        return None
    if (name in _RANKS or name.startswith("data_parallel_")) and value != _RANKS.get(name):
        return (
            "An engine in this process runs on one GPU. Start servers with vLLM's argument of that "
            'name and use `rollout_engine="vllm-server"`.'
        )
    if name in _QUANTISED and not is_checkpoint:
        return (
            "A learner's weights can't be loaded into a quantised engine. Build the engine "
            "unquantised, or from a quantised checkpoint's path with a LoRA learner."
        )
    if name in _SPECULATIVE:
        return "The logprobs of drafted tokens were seen to be wrong. Leave it out."
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMOptions:
    """Hold the options of an engine in this process, and turn them into vLLM's arguments."""

    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    further: dict[str, Any]  # arguments of `vllm.EngineArgs` that override these
    lora_rank: int | None = None  # None: no adapter
    sleep_mode: bool = False
    gpu: int | None = None  # index of the learner's GPU, which the engine shares

    def engine_args(self, config: PreTrainedConfig, *, on_cpu: bool) -> dict[str, Any]:
        """Return the arguments of `vllm.EngineArgs`, without the model."""
        device = self._cpu_args(config) if on_cpu else self._cuda_args()
        if self.lora_rank is not None:
            device |= lora_args(self.lora_rank)
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "runner": "generate",
            "skip_tokenizer_init": True,  # ids in, ids out
            "generation_config": "vllm",  # neutral sampling; ignore the checkpoint's advice
            "logprobs_mode": "processed_logprobs",  # of the sampled distribution
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
            "enable_sleep_mode": self.sleep_mode,
            **device,
            **self.further,
        }

    def _cuda_args(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_batched_tokens": max(_MAX_BATCHED_TOKENS, self.max_num_seqs),
        }
        if self.kv_cache_memory_bytes is not None:
            arguments["kv_cache_memory_bytes"] = self.kv_cache_memory_bytes
        return arguments

    def _cpu_args(self, config: PreTrainedConfig) -> dict[str, Any]:
        cache_bytes = self.kv_cache_memory_bytes or _cpu_kv_cache_bytes(
            config, self.dtype, self.max_model_len, self.max_num_seqs
        )
        return {
            "enforce_eager": True,  # compiling costs more than it saves here
            "block_size": _CPU_BLOCK_SIZE,
            "kv_cache_memory_bytes": cache_bytes,
            # A prompt prefilled in pieces rewinds its seeded generator; CPU generators can't.
            "enable_chunked_prefill": False,
            # vLLM caches the states of recurrent layers only where prompts may be cut.
            "enable_prefix_caching": not has_recurrent_layers(config),
            "max_num_batched_tokens": max(_MAX_BATCHED_TOKENS, self.max_model_len),
        }


def _cpu_kv_cache_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, max_model_len: int, max_num_seqs: int
) -> int:
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * head_size(config) * dtype.itemsize
    sequence = token * (max_model_len + 2 * _CPU_BLOCK_SIZE)
    return max(min(sequence * max_num_seqs, _CPU_KV_CACHE_LIMIT), 2 * sequence)
