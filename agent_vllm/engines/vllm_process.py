"""vLLM inside this process: how it is built, stepped, given weights and ended.

Owns every call into vLLM, with `vllm_cpu`. Invariant: after a reload no cache made with older
weights is used.
"""

import gc
import itertools
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from agent_vllm.engines import vllm_cpu
from agent_vllm.engines.base import EngineStats, GenerationRequest
from agent_vllm.engines.driver import Outcome
from agent_vllm.engines.host_state import host_process_kept, random_state_kept
from agent_vllm.engines.models import ModelSource, evaluating
from agent_vllm.errors import EngineError, UnsupportedModelError, WeightSyncError
from agent_vllm.logprobs import predicted_logprobs
from agent_vllm.types import Completion

_CPU_BLOCK_SIZE = 32  # the smallest that the CPU attention takes; only full blocks are reused
_CPU_KV_CACHE_LIMIT = 1 << 30  # bytes; vLLM zeroes them at start, about a second a GiB
_CPU_MAX_BATCHED_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """What the engine is built with; `further` are arguments of `vllm.EngineArgs`."""

    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    further: dict[str, Any]

    def engine_args(self, config: PreTrainedConfig) -> dict[str, Any]:
        device = self._cpu_args(config) if vllm_cpu.is_cpu() else self._cuda_args()
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "runner": "generate",
            "skip_tokenizer_init": True,  # ids go in and ids come out
            "generation_config": "vllm",  # neutral sampling, whatever the checkpoint recommends
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
            **device,
            **self.further,
        }

    def _cuda_args(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"gpu_memory_utilization": self.gpu_memory_utilization}
        if self.kv_cache_memory_bytes is not None:
            arguments["kv_cache_memory_bytes"] = self.kv_cache_memory_bytes
        return arguments

    def _cpu_args(self, config: PreTrainedConfig) -> dict[str, Any]:
        cache_bytes = self.kv_cache_memory_bytes or _cpu_kv_cache_bytes(
            config, self.dtype, self.max_model_len, self.max_num_seqs
        )
        return {
            "enforce_eager": True,  # compiling takes longer than it saves here
            "block_size": _CPU_BLOCK_SIZE,
            "kv_cache_memory_bytes": cache_bytes,
            # A prompt prefilled in pieces rewinds its seeded generator; CPU generators can't.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_CPU_MAX_BATCHED_TOKENS, self.max_model_len),
        }


def _cpu_kv_cache_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, max_model_len: int, max_num_seqs: int
) -> int:
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * head_dim * dtype.itemsize
    sequence = token * (max_model_len + 2 * _CPU_BLOCK_SIZE)
    return max(min(sequence * max_num_seqs, _CPU_KV_CACHE_LIMIT), 2 * sequence)


def _build(source: ModelSource, options: VLLMOptions) -> Any:
    """A `vllm.LLMEngine` in this process; with weights if the source has a path."""
    with ExitStack() as stack:
        stack.enter_context(host_process_kept())
        from vllm import EngineArgs, LLMEngine

        _prepare_architecture(source.config.architectures)
        if vllm_cpu.is_cpu():
            vllm_cpu.skip_rank_compilation()
            if vllm_cpu.is_small(source.shapes, options.dtype):
                stack.enter_context(vllm_cpu.unpacked_weights())
        path, load_format = source.path, "auto"
        if path is None:
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="agent_vllm_"))
            source.config.save_pretrained(path)
            load_format = "dummy"
        return LLMEngine.from_engine_args(
            EngineArgs(model=path, load_format=load_format, **options.engine_args(source.config))
        )


def _prepare_architecture(architectures: list[str] | None) -> None:
    """Load vLLM's class here: vLLM would inspect it in a fresh process, which takes 10 s."""
    from vllm.model_executor.models.registry import ModelRegistry

    known = [name for name in architectures or [] if name in ModelRegistry.models]
    if not known:
        raise UnsupportedModelError(
            f"vLLM has no implementation of {architectures}. Use the torch engine "
            '(rollout_engine="torch").'
        )
    for name in known:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


class VLLMStepper:
    """The driver's engine: `LLMEngine.add_request` and `step`."""

    def __init__(self, source: ModelSource, options: VLLMOptions) -> None:
        had_default = torch.distributed.is_initialized()
        self.policy_version = 0
        self._llm = _build(source, options)
        # Its finalizer ends every process group of this process, even long after; see `shutdown`.
        self._llm.engine_core._finalizer.detach()
        self._llm.output_processor.tokenizer = source.tokenizer  # read for stop strings only
        if vllm_cpu.is_cpu():
            vllm_cpu.draw_our_noise(self._llm)
        self._is_unpacked = vllm_cpu.is_cpu() and vllm_cpu.is_unpacked(self._llm)
        self._counter = itertools.count()
        self._requests: dict[str, GenerationRequest] = {}
        self._internal_ids: dict[GenerationRequest, str] = {}
        self.stats = EngineStats()
        _process_groups.acquire(self, had_default=had_default)

    def add(self, request: GenerationRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            stop_token_ids=list(request.stop_token_ids),
            stop=list(request.stop_strings),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(request.stop_strings),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = str(next(self._counter))
        prompt = {"prompt_token_ids": request.prompt_ids}
        self._internal_ids[request] = self._llm.add_request(request_id, prompt, params)
        self._requests[request_id] = request

    def step(self) -> list[tuple[GenerationRequest, Outcome]]:
        with random_state_kept():
            outputs = self._llm.step()
        finished = [output for output in outputs if output.finished]
        self._count(finished)
        return [self._finish(output) for output in finished]

    def _count(self, finished: Iterable[Any]) -> None:
        _, num_waiting = self._llm.engine_core.engine_core.scheduler.get_request_counts()
        stats = self.stats
        self.stats = EngineStats(
            num_prompt_tokens=stats.num_prompt_tokens
            + sum(len(output.prompt_token_ids) for output in finished),
            num_cached_tokens=stats.num_cached_tokens
            + sum(output.num_cached_tokens or 0 for output in finished),
            num_steps=stats.num_steps + 1,
            num_waiting=stats.num_waiting + num_waiting,
        )

    def _finish(self, output: Any) -> tuple[GenerationRequest, Outcome]:
        request = self._requests.pop(output.request_id)
        del self._internal_ids[request]
        return request, _completion_of(output, request, self.policy_version)

    def abort(self, requests: Iterable[GenerationRequest]) -> None:
        gone = set(requests)
        ids = [self._internal_ids.pop(request) for request in gone if request in self._internal_ids]
        self._requests = {key: value for key, value in self._requests.items() if value not in gone}
        self._llm.abort_request(ids, internal=True)

    def reload(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load, by vLLM's layer-wise reload where weights are packed; then drop the caches."""
        with random_state_kept():
            if self._is_unpacked:
                vllm_cpu.load_unpacked(self._llm, weights)
            else:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError(
                "vLLM refused to reset its prefix cache, so tokens would come from old weights. "
                "Requests are still running."
            )

    def gap_to(self, model: PreTrainedModel, vocab_size: int) -> float:
        """Largest distance of a sampled logprob from the learner's, over a few random prompts."""
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(vocab_size, (2, 8), generator=generator).tolist()
        for seed, prompt in enumerate(prompts):
            self.add(
                GenerationRequest(
                    prompt_ids=prompt, max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=0,
                    min_p=0.0, seed=seed,
                )
            )  # fmt: skip
        gaps = []
        while self._requests:
            for request, outcome in self.step():
                if isinstance(outcome, Exception):
                    raise outcome
                gaps.append(_gap(model, request.prompt_ids, outcome))
        return max(gaps)

    def shutdown(self) -> None:
        """End vLLM. Its own `shutdown` would end the learner's and other engines' groups too."""
        core = self._llm.engine_core.engine_core
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()  # vLLM froze what it allocated
        del self._llm  # a successor needs the memory
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()
        _process_groups.release(self)


class _ProcessGroups:
    """vLLM's process groups, which all engines of this process share; gone with the last one.

    A default group that was there before vLLM is the learner's and stays.
    """

    def __init__(self) -> None:
        self._users: set[VLLMStepper] = set()
        self._default_is_ours = False

    def acquire(self, user: VLLMStepper, *, had_default: bool) -> None:
        if not self._users:
            self._default_is_ours = not had_default
        self._users.add(user)

    def release(self, user: VLLMStepper) -> None:
        from vllm.distributed import parallel_state

        self._users.discard(user)
        if self._users:
            return
        parallel_state.destroy_model_parallel()
        if self._default_is_ours:
            parallel_state.destroy_distributed_environment()


_process_groups = _ProcessGroups()


def _completion_of(output: Any, request: GenerationRequest, policy_version: int) -> Outcome:
    sample = output.outputs[0]
    if list(output.prompt_token_ids) != request.prompt_ids:
        return EngineError("vLLM changed the prompt; its completion is dropped.")
    if sample.logprobs is None or sample.finish_reason not in ("stop", "length"):
        return EngineError(
            f"vLLM ended the request with finish_reason {sample.finish_reason!r} and "
            f"{'no ' if sample.logprobs is None else ''}logprobs."
        )
    try:
        return Completion(
            token_ids=list(sample.token_ids),
            logprobs=list(sample.logprobs.logprobs),
            finish_reason=sample.finish_reason,
            policy_version=policy_version,
        )
    except ValueError as error:
        return EngineError(f"vLLM returned an inconsistent completion: {error}")


def _gap(model: PreTrainedModel, prompt_ids: list[int], completion: Completion) -> float:
    device = next(model.parameters()).device
    ids = torch.tensor([prompt_ids + completion.token_ids], device=device)
    with evaluating(model):
        learner = predicted_logprobs(model(input_ids=ids).logits, ids)[0, len(prompt_ids) - 1 :]
    return (learner.cpu() - torch.tensor(completion.logprobs)).abs().max().item()
