"""Build vLLM in this process, step it, load weights into it and end it.

Owns the calls into `LLMEngine`. Invariant: a token is sampled only from keys and values that were
computed with the current weights: caches are dropped after a load and after a failed step.
"""

import concurrent.futures
import gc
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from agent_vllm.engines.base import EngineStats
from agent_vllm.engines.gpu import finish_work
from agent_vllm.engines.learner import ModelSource
from agent_vllm.engines.mailbox import Outcome
from agent_vllm.engines.request import GenerationRequest
from agent_vllm.engines.vllm import cpu, process_groups
from agent_vllm.engines.vllm.host_state import host_process_kept, random_state_kept
from agent_vllm.engines.vllm.loading import load_into
from agent_vllm.engines.vllm.lora import LoadedAdapter
from agent_vllm.engines.vllm.model_folder import lasting_folder, temporary_folder
from agent_vllm.engines.vllm.options import VLLMOptions
from agent_vllm.errors import EngineDeadError, EngineError, UnsupportedModelError, WeightSyncError
from agent_vllm.types import Completion


def check_sleep_mode() -> None:
    """Check that vLLM can free its memory between rollouts.

    Raises:
        ValueError: this platform can't.
    """
    with host_process_kept():
        from vllm.platforms import current_platform

        if not current_platform.is_sleep_mode_available():
            raise ValueError(
                "`sleep_mode` (the trainer's `vllm_enable_sleep_mode`) must be False here, got "
                "True: vLLM's sleep mode is not supported on this platform "
                f"({current_platform.device_type}), where there is no GPU memory to give back."
            )


def _build(source: ModelSource, options: VLLMOptions) -> Any:
    """Build a `vllm.LLMEngine` in this process, with weights if the source has a path."""
    with ExitStack() as stack:
        stack.enter_context(_unsupported_named(source.config.architectures))
        stack.enter_context(host_process_kept())
        stack.enter_context(process_groups.own_default_group())
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext

        _prepare_architecture(source.config.architectures)
        if cpu.is_cpu():
            cpu.check_head_size(source.config)
            cpu.skip_rank_compilation()
            if cpu.is_small(source.shapes, options.dtype):
                stack.enter_context(cpu.unpacked_weights())
        path, load_format = source.path, "auto"
        if path is None:
            load_format = "dummy"
            if cpu.is_cpu():
                path = stack.enter_context(temporary_folder(source.config))
            else:
                path = lasting_folder(source.config, options.gpu)
        args = EngineArgs(
            model=path,
            load_format=load_format,
            **options.engine_args(source.config, on_cpu=cpu.is_cpu()),
        )
        config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        if options.gpu:  # vLLM would take GPU 0 on every rank
            config.device_config.device = torch.device("cuda", options.gpu)
        return LLMEngine.from_vllm_config(config, disable_log_stats=args.disable_log_stats)


@contextmanager
def _unsupported_named(architectures: list[str] | None) -> Iterator[None]:
    """Name the model if vLLM's code for it fails: a package or an attribute is missing."""
    try:
        yield
    except (AttributeError, ImportError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"vLLM can't build {architectures}: {type(error).__name__}: {error}. Use the torch "
            'engine (rollout_engine="torch").'
        ) from error


def _prepare_architecture(architectures: list[str] | None) -> None:
    """Load vLLM's class here: vLLM would inspect it in a new process, which takes 10 s."""
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
    """Step vLLM for the driver: `LLMEngine.add_request` and `step`."""

    def __init__(self, source: ModelSource, options: VLLMOptions) -> None:
        self.policy_version = 0
        process_groups.acquire(self)
        try:
            self._llm = _build(source, options)
        except BaseException:
            process_groups.release(self)
            raise
        # Its finalizer ends every process group of this process, even long after; see `shutdown`.
        self._llm.engine_core._finalizer.detach()
        self._llm.output_processor.tokenizer = source.tokenizer  # read for stop strings only
        if cpu.is_cpu():
            cpu.draw_our_noise(self._llm)
        self.adapter = None if options.lora_rank is None else LoadedAdapter(self._llm)
        self._gpu = options.gpu
        self._is_asleep = False
        self._counter = itertools.count()
        self._requests: dict[str, GenerationRequest] = {}
        self._internal_ids: dict[GenerationRequest, str] = {}
        self.stats = EngineStats()

    def add(self, request: GenerationRequest) -> None:
        if self._is_asleep:
            raise EngineError("The engine is asleep. Give it the learner's weights to wake it up.")
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            min_p=request.sampling.min_p,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            stop_token_ids=list(request.stop_token_ids),
            stop=list(request.sampling.stop_strings),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(request.sampling.stop_strings),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = str(next(self._counter))
        prompt = {"prompt_token_ids": request.prompt_ids}
        lora = self.adapter and self.adapter.request
        self._internal_ids[request] = self._llm.add_request(
            request_id, prompt, params, lora_request=lora
        )
        self._requests[request_id] = request

    def step(self) -> list[tuple[GenerationRequest, Outcome]]:
        """Advance all requests; return those that are done.

        If it fails, all requests are aborted and the prefix cache is empty.

        Raises:
            EngineDeadError: the step failed, and so did dropping what it left.
        """
        try:
            with random_state_kept():
                outputs = self._llm.step()
            finished = [output for output in outputs if output.finished]
            self._count(finished)
            return [self._finish(output) for output in finished]
        except Exception as error:
            self._discard_failed_step(error)
            raise

    def _discard_failed_step(self, error: Exception) -> None:
        """Drop the step's keys and values: vLLM cached them before they were computed."""
        core = self._llm.engine_core.engine_core
        try:
            while core.batch_queue:  # async scheduling: steps that were sent after this one
                concurrent.futures.wait([core.batch_queue.pop()[0]])
            core.model_executor.driver_worker.model_runner.execute_model_state = None
            self.abort(list(self._internal_ids))
            self._drop_caches()
        except Exception as trouble:
            raise EngineDeadError(
                f"A step failed ({type(error).__name__}: {error}), and what it left in vLLM could "
                f"not be dropped: {type(trouble).__name__}: {trouble}"
            ) from error

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

    def load(
        self,
        weights: Iterator[tuple[str, torch.Tensor]] | None,
        adapter: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """Load weights, an adapter or both; then drop every cache made with older ones.

        A sleeping engine wakes up: its weights' memory first, its key/value cache last.

        Args:
            weights: under the checkpoint's names; None keeps the current ones.
            adapter: None leaves the model without an adapter.
        """
        if self._is_asleep:
            self._llm.wake_up(tags=["weights"])
        with random_state_kept():
            if self.adapter is not None:
                self.adapter.drop()
            if weights is not None:
                load_into(self._llm, weights)
            if adapter is not None:
                assert self.adapter is not None
                self.adapter.load(adapter)
        finish_work(self._gpu)
        self._drop_caches()
        if self._is_asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._is_asleep = False

    def _drop_caches(self) -> None:
        self._llm.reset_mm_cache()
        self._llm.reset_encoder_cache()
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError(
                "vLLM refused to reset its prefix cache, so tokens would come from keys and values "
                "that don't belong to the current weights. Requests are still running."
            )

    def sleep(self) -> None:
        """Free the memory of weights and caches; `load` with all weights wakes the engine up."""
        self._llm.sleep(level=2)
        self._is_asleep = True

    def sample(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample these requests to their end; no others may be in the engine."""
        for request in requests:
            self.add(request)
        outcomes: dict[GenerationRequest, Outcome] = {}
        while self._requests:
            outcomes |= dict(self.step())
        return [_completion(outcomes[request]) for request in requests]

    def shutdown(self) -> None:
        """End vLLM, but not the process groups of the learner and of other engines."""
        core = self._llm.engine_core.engine_core
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()  # vLLM froze its objects
        self.adapter = None  # which holds it too
        del self._llm  # a successor needs the memory
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()
        process_groups.release(self)


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


def _completion(outcome: Outcome) -> Completion:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
