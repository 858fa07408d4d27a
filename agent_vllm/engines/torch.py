"""Sample with plain PyTorch: the engine that tests compare against.

Owns a readable generation loop over a batch with a key/value cache. It generates whole batches:
requests that arrive during one wait for the next. Invariant: a row's tokens depend only on its own
prompt and seed, and its logprobs are those of the distribution it was sampled from.

Legend: B rows alive, P padded prompt, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agent_vllm.engines.base import RolloutEngine
from agent_vllm.engines.driver import HANG_S, StepDriver
from agent_vllm.engines.gpu import gpu_of
from agent_vllm.engines.learner import (
    LearnerWeights,
    check_shapes,
    gap_bound,
    gap_to,
    model_source,
    own_config,
    plain_class,
)
from agent_vllm.engines.models import context_length, evaluating, is_recurrent
from agent_vllm.engines.request import GenerationRequest, ends_on_string
from agent_vllm.engines.sampling_noise import NoiseStream, draw_noise, noise_stream
from agent_vllm.engines.vllm.host_state import random_state_kept
from agent_vllm.errors import UnsupportedModelError
from agent_vllm.training import gather_logprobs, pad_rows
from agent_vllm.types import Completion


class TorchRolloutEngine(RolloutEngine):
    """Sample from a transformers model in this process.

    Built from a model, it shares that module, adapters included, so an update costs nothing. It
    generates in eval mode and restores the model's mode. A sharded learner can't run inside a
    rollout, where ranks don't meet, so the engine keeps a whole copy of it.

    Args:
        model: a causal language model, or a path or id to load one from.
        tokenizer: its tokenizer; default is the one at the path.
        max_model_len: prompt and completion together; default is the model's own context.
        max_batch_size: rows generated at once; halved when a batch runs out of memory.
        seed: for requests without a seed.
        hang_s: seconds without a token after which the engine counts as dead; None disables it.

    Raises:
        UnsupportedModelError: the model has recurrent layers and can't be sampled in batches.

    Example:

    ```python
    with TorchRolloutEngine("Qwen/Qwen3-0.6B") as engine:
        result = engine.rollout(prompt_ids, attention_mask, num_generations=4, max_new_tokens=64)
    ```
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_model_len: int | None = None,
        max_batch_size: int = 256,
        seed: int = 0,
        hang_s: float | None = HANG_S,
    ) -> None:
        if isinstance(model, str | Path):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            model = AutoModelForCausalLM.from_pretrained(model)
        source = model_source(model, tokenizer)
        super().__init__(
            tokenizer=source.tokenizer,
            vocab_size=source.vocab_size,
            max_model_len=max_model_len or context_length(source.config),
            eos_token_ids=source.eos_token_ids,
            seed=seed,
        )
        self._shapes = source.shapes
        self._copy: PreTrainedModel | None = None
        self._driver = StepDriver("torch rollout engine", hang_s=hang_s, gpu=gpu_of(model))
        runnable = self._runnable(LearnerWeights(model))
        if is_recurrent(runnable):
            _check_recurrent(runnable, self.tokenizer, self.vocab_size)
        self._batch = _WholeBatches(
            runnable, self.tokenizer, max_batch_size, self._driver.note_progress
        )
        self._driver.attach(self._batch)

    async def _sample(self, request: GenerationRequest) -> Completion:
        self._batch.policy_version = self.policy_version
        return await self._driver.submit(request)

    def _load_weights(self, model: PreTrainedModel) -> None:
        weights = LearnerWeights(model)
        if weights.model is not self._batch.model:
            check_shapes(self._shapes, weights.shapes)
        self._driver.call(lambda: setattr(self._batch, "model", self._runnable(weights)))

    def _runnable(self, weights: LearnerWeights) -> PreTrainedModel:
        """Return the learner's own module, or the engine's filled copy if it is sharded."""
        self.num_synced_bytes = 0
        if not weights.is_sharded:
            return weights.model
        if self._copy is None:
            self._copy = _like(weights.model)
        _fill(self._copy, weights)
        self.num_synced_bytes = weights.num_bytes_read
        return self._copy

    @property
    def dtype(self) -> torch.dtype:
        return self._batch.model.dtype

    @property
    def death(self) -> str | None:
        return self._driver.death

    def close(self) -> None:
        self._driver.close()


def _check_recurrent(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> None:
    """Check that a batch of uneven rows gets the logprobs that each row has by itself.

    Raises:
        UnsupportedModelError: padding leaks into the model's state, or its cache can't lose a row.
    """

    def sample(requests: list[GenerationRequest]) -> list[Completion]:
        with evaluating(model):
            rows = _generate(model, tokenizer, requests, lambda: None)
        return [row.completion(0) for row in rows]

    name, remedy = type(model).__name__, 'Use vLLM (rollout_engine="vllm").'
    try:
        gap = gap_to(model, sample, vocab_size, num_prompts=4)
    except Exception as error:
        raise UnsupportedModelError(
            f"The torch engine can't run {name}, which has recurrent layers: "
            f"{type(error).__name__}: {error}. {remedy}"
        ) from error
    if not gap_bound(model.dtype, device=model.device).holds(gap):
        raise UnsupportedModelError(
            f"The torch engine can't run {name} in batches: its recurrent layers read padding, and "
            f"logprobs are away from those of each row by itself by {gap}. {remedy}"
        )


@torch.no_grad()
def _fill(copy: PreTrainedModel, weights: LearnerWeights) -> None:
    own, given = copy.state_dict(), weights.module_meta
    check_shapes(
        {name: tensor.shape for name, tensor in own.items()},
        {name: tensor.shape for name, tensor in given.items()},
    )
    for name, tensor in weights.module_tensors():
        own[name].copy_(tensor)


def _like(learner: PreTrainedModel) -> PreTrainedModel:
    """Make a whole model of the learner's class on its device, without the weights."""
    with random_state_kept():
        model = plain_class(learner)._from_config(  # type: ignore[attr-defined]
            own_config(learner),
            dtype=learner.dtype,
            attn_implementation=learner.config._attn_implementation,
        )
    return model.to(next(learner.parameters()).device)


class _WholeBatches:
    """Step for the driver: each step samples all waiting requests to their end."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_batch_size: int,
        note_progress: Callable[[], None],
    ) -> None:
        self.model = model
        self.policy_version = 0
        self._note_progress = note_progress
        self._tokenizer = tokenizer
        self._max_batch_size = max_batch_size
        self._waiting: list[GenerationRequest] = []

    def add(self, request: GenerationRequest) -> None:
        self._waiting.append(request)

    def abort(self, requests: Iterable[GenerationRequest]) -> None:
        gone = set(requests)
        self._waiting = [request for request in self._waiting if request not in gone]

    def step(self) -> list[tuple[GenerationRequest, Completion]]:
        batch = self._waiting[: self._max_batch_size]
        try:
            with evaluating(self.model):
                rows = _generate(self.model, self._tokenizer, batch, self._note_progress)
        except torch.OutOfMemoryError:
            self._max_batch_size = max(len(batch) // 2, 1)  # they are retried
            raise
        self._waiting = self._waiting[self._max_batch_size :]
        return [(row.request, row.completion(self.policy_version)) for row in rows]


@dataclass(kw_only=True, eq=False)
class _RowState:
    request: GenerationRequest
    noise: NoiseStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def is_done(self) -> bool:
        return self.stopped or len(self.token_ids) == self.request.max_new_tokens

    def notice_stop(self, tokenizer: PreTrainedTokenizerBase) -> None:
        request = self.request
        self.stopped = self.token_ids[-1] in request.stop_token_ids or ends_on_string(
            tokenizer, self.token_ids, request.sampling.stop_strings
        )

    def completion(self, policy_version: int) -> Completion:
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason="stop" if self.stopped else "length",
            policy_version=policy_version,
        )


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: list[GenerationRequest],
    note_progress: Callable[[], None],
) -> list[_RowState]:
    """Sample every request to its end. Rows leave the batch as they finish."""
    device = next(model.parameters()).device
    rows = [_RowState(request=r, noise=noise_stream(r.seed, device)) for r in requests]
    alive = list(rows)
    input_ids = pad_rows([r.prompt_ids for r in requests], 0, side="left").to(device)  # [B, P]
    mask = pad_rows([[1] * len(r.prompt_ids) for r in requests], 0, side="left").to(device)
    cache = DynamicCache(config=model.config)
    while alive:
        note_progress()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        logits = model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # [B, V]
        token_ids = _sample_tokens(logits, alive)
        for row in alive:
            row.notice_stop(tokenizer)
        keep = [index for index, row in enumerate(alive) if not row.is_done]
        if len(keep) < len(alive):
            alive = [alive[index] for index in keep]
            kept = torch.tensor(keep, device=device, dtype=torch.long)
            token_ids, mask = token_ids[kept], mask[kept]
            cache.reorder_cache(kept)  # type: ignore[arg-type]
        input_ids = token_ids[:, None]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
    return rows


def _sample_tokens(logits: torch.Tensor, rows: list[_RowState]) -> torch.Tensor:
    """Sample one token per row, `[B]`, and add it to the row with its logprob."""
    scaled = torch.stack(
        [_scale(row, state.request) for row, state in zip(logits, rows, strict=True)]
    )
    streams = [state.noise if state.request.sampling.temperature else None for state in rows]
    noise = draw_noise(streams, scaled.shape[-1], scaled.device)
    chosen = (scaled.softmax(-1) / noise).argmax(-1)
    logprobs = gather_logprobs(scaled, chosen)
    for row, token, logprob in zip(rows, chosen.tolist(), logprobs.tolist(), strict=True):
        row.token_ids.append(token)
        row.logprobs.append(logprob)
    return chosen


def _scale(logits: torch.Tensor, request: GenerationRequest) -> torch.Tensor:
    """Return float32 logits `[V]` of the sampled distribution; -inf for tokens that are cut off.

    As vLLM: greedy rows ignore the filters, and the others apply them in the order of
    `SamplingParams`.
    """
    sampling = request.sampling
    if sampling.temperature == 0:
        return logits.float()
    scaled = logits.float() / sampling.temperature
    warpers = LogitsProcessorList()
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers(None, scaled[None])[0] if warpers else scaled  # type: ignore[arg-type]
