"""Sample with vLLM in this process, on the learner's device.

Owns the engine that users see; calls into vLLM are in the modules beside this one. Invariant: the
engine holds the weights of the last learner it was given. The first sync is checked against the
learner's logprobs.

Measured on the CPU build of vLLM 0.31. On CUDA vLLM takes other code by default, which was not run.
"""

import importlib.util
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.engines.base import EngineStats, RolloutEngine
from agent_vllm.engines.driver import HANG_S, StepDriver
from agent_vllm.engines.gpu import finish_work, gpu_of
from agent_vllm.engines.learner import (
    LearnerWeights,
    ModelSource,
    check_against_learner,
    check_shapes,
    model_source,
)
from agent_vllm.engines.models import context_length, to_dtype
from agent_vllm.engines.request import GenerationRequest
from agent_vllm.engines.vllm.options import VLLMOptions, check_engine_args
from agent_vllm.engines.vllm.stepper import VLLMStepper, check_sleep_mode
from agent_vllm.errors import EngineUnavailableError
from agent_vllm.types import Completion

AdapterSync = Literal["auto", "adapter", "merged"]
_PATH_LORA_RANK = 16  # of an engine that has not seen its learner; `engine_args` can raise it


class VLLMRolloutEngine(RolloutEngine):
    """Sample with vLLM's continuous batching and prefix cache, driven step by step.

    Built from a model, it starts with that model's weights; no checkpoint is written. The first
    update also checks the engine's logprobs against the learner's.

    Args:
        model: a causal language model, or a path or id to load one from.
        tokenizer: its tokenizer; default is the one at the path.
        dtype: of the engine's weights, or its name; default is the model's. A learner's matrices
            are rounded to it when they are loaded.
        max_model_len: prompt and completion together; default is the model's own context.
        max_num_seqs: sequences sampled at once; others queue.
        gpu_memory_utilization: share of the GPU that vLLM may take; the learner needs the rest.
        kv_cache_memory_bytes: size of the key/value cache; on CPU the default is what
            `max_num_seqs` sequences can use, at most 1 GiB.
        adapter_sync: how a PEFT learner is synced. `"adapter"`: the base once, then the LoRA
            adapter alone. `"merged"`: all weights each time, with the adapter merged into copies.
            `"auto"`: the adapter alone if nothing else is trained.
        sleep_mode: allow `sleep`, which frees the GPU's memory.
        seed: for requests without a seed.
        hang_s: seconds without progress after which the engine counts as dead; None disables it.
            Compiling on first use and a weight sync must fit in. Building is not watched.
        engine_args: further arguments of `vllm.EngineArgs`, by its own names. Those that can't be
            obeyed, such as parallel sizes, are refused.

    Raises:
        EngineUnavailableError: vLLM is not installed.
        ValueError: an argument can't be obeyed; or the learner's head is finer than the engine's.
        UnsupportedModelError: vLLM has no implementation of the architecture.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        gpu_memory_utilization: float = 0.3,
        kv_cache_memory_bytes: int | None = None,
        adapter_sync: AdapterSync = "auto",
        sleep_mode: bool = False,
        seed: int = 0,
        hang_s: float | None = HANG_S,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        _require_vllm()
        if adapter_sync not in get_args(AdapterSync):
            raise ValueError(
                f"`adapter_sync` must be one of {get_args(AdapterSync)}, got {adapter_sync!r}."
            )
        check_engine_args(engine_args or {}, is_checkpoint=isinstance(model, str | Path))
        if sleep_mode:
            check_sleep_mode()
        source = model_source(model, tokenizer)
        super().__init__(
            tokenizer=source.tokenizer,
            vocab_size=source.vocab_size,
            max_model_len=max_model_len or context_length(source.config),
            eos_token_ids=source.eos_token_ids,
            seed=seed,
        )
        self._shapes = source.shapes
        self._dtype = to_dtype(dtype or source.dtype)
        _check_head(source, self._dtype, engine_args or {})
        self._is_checked = False
        self._adapter_sync = adapter_sync
        self._base: weakref.ref | None = None  # the model whose base weights the engine holds
        options = VLLMOptions(
            dtype=self._dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            lora_rank=_lora_rank(model, adapter_sync),
            sleep_mode=sleep_mode,
            gpu=gpu_of(model),
            further=engine_args or {},
        )
        self._driver = StepDriver("vllm rollout engine", hang_s=hang_s, gpu=options.gpu)
        self._start(source, options)
        if not isinstance(model, str | Path):
            try:
                self._load_weights(model)
            except BaseException:
                self.close()
                raise

    def _start(self, source: ModelSource, options: VLLMOptions) -> None:
        try:
            self._stepper = self._driver.call(lambda: VLLMStepper(source, options))
        except BaseException:
            self._driver.close()
            raise
        self._driver.attach(self._stepper)

    async def _sample(self, request: GenerationRequest) -> Completion:
        self._stepper.policy_version = self.policy_version
        return await self._driver.submit(request)

    def _load_weights(self, model: PreTrainedModel) -> None:
        weights = LearnerWeights(model, dtype=self._dtype)
        adapter_only = self._sends_adapter_only(weights)
        finish_work(gpu_of(model))  # the engine's thread may have a stream of its own
        has_base = self._base is not None and self._base() is weights.model
        if adapter_only and (has_base or weights.is_quantised):
            self._driver.call(lambda: self._load(weights, None, adapter_only=True))
        else:
            check_shapes(self._shapes, weights.shapes)
            self._base = None
            with closing(weights.tensors(merged=not adapter_only)) as tensors:
                self._driver.call(lambda: self._load(weights, tensors, adapter_only=adapter_only))
        self._base = weakref.ref(weights.model) if adapter_only else None

    def _sends_adapter_only(self, weights: LearnerWeights) -> bool:
        if self._stepper.adapter is None or self._adapter_sync == "merged":
            return False
        return self._adapter_sync == "adapter" or weights.why_not_adapter_only is None

    def _load(
        self,
        weights: LearnerWeights,
        tensors: Iterator[tuple[str, torch.Tensor]] | None,
        *,
        adapter_only: bool,
    ) -> None:
        self._stepper.load(tensors, weights.adapter_tensors() if adapter_only else None)
        self.num_synced_bytes = weights.num_bytes_read
        if not self._is_checked and not weights.is_sharded:
            check_against_learner(
                weights.model,
                self._stepper.sample,
                vocab_size=self.vocab_size,
                dtype=self._dtype,
            )
            self._is_checked = True

    def sleep(self) -> None:
        """Free the GPU's memory until the next update; its content is lost.

        Raises:
            EngineBusyError: requests are in flight.
        """
        self._base = None
        self._driver.call(self._stepper.sleep)

    def stats(self) -> EngineStats:
        return self._stepper.stats

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def death(self) -> str | None:
        return self._driver.death

    def close(self) -> None:
        self._driver.close(self._stepper.shutdown)


def _check_head(source: ModelSource, dtype: torch.dtype, engine_args: dict[str, Any]) -> None:
    """Refuse a head that is finer than the rest of the learner and that the engine would round.

    A learner in float32 throughout may well have a coarser engine: that is mixed precision.
    """
    is_set = "head_dtype" in (engine_args.get("hf_overrides") or {})
    is_finer = source.head_dtype == torch.float32 != source.dtype
    if is_finer and dtype != torch.float32 and not is_set:
        raise ValueError(
            f"The learner's head is float32, the rest {source.dtype}, and the engine would be "
            f"{dtype}: their logprobs would differ. Keep both the same: leave the head as it is "
            "(`cast_lm_head_to_fp32=False`), or give the engine `dtype=torch.float32`, or on a GPU "
            '`engine_args={"hf_overrides": {"head_dtype": "float32"}}`, which computes in float32 '
            "with a rounded head."
        )


def _lora_rank(model: PreTrainedModel | str | Path, adapter_sync: AdapterSync) -> int | None:
    """Return the rank to reserve for an adapter that is sent alone; None if none is."""
    if adapter_sync == "merged":
        return None
    if isinstance(model, str | Path):
        return _PATH_LORA_RANK if adapter_sync == "adapter" else None
    return LearnerWeights(model).adapter_rank


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise EngineUnavailableError(
            "The vLLM engine needs vLLM, which is not installed. Install `agent-vllm[cuda]`, or "
            'without a GPU `agent-vllm[cpu]`; or use rollout_engine="torch".'
        )
