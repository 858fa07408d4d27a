"""Define the engine interface: token ids in, sampled token ids with their logprobs out.

Owns what all engines share: the checks around a request, versions of weights, and the tensor
interface on top of single sequences. Knows nothing of chats or tools.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.blocking import run_blocking
from agent_vllm.engines.request import GenerationRequest, check_completion, check_prompt
from agent_vllm.engines.tensors import RolloutResult, prompt_rows, to_tensors
from agent_vllm.errors import EngineBusyError, EngineError, InvalidRequestError
from agent_vllm.settings import SamplingParams
from agent_vllm.types import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Count what an engine has done since it was built."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_steps: int = 0
    num_waiting: int = 0  # queued requests, summed over the steps

    def since(self, earlier: "EngineStats") -> "EngineStats":
        """Return the counts since an earlier reading."""
        return EngineStats(
            num_prompt_tokens=self.num_prompt_tokens - earlier.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens - earlier.num_cached_tokens,
            num_steps=self.num_steps - earlier.num_steps,
            num_waiting=self.num_waiting - earlier.num_waiting,
        )


class RolloutEngine(ABC):
    """Sample sequences with one policy whose weights can be replaced.

    Subclasses implement `_sample` and `_load_weights`; the checks live here.

    Args:
        tokenizer: decodes completions in `rollout` and pads them.
        vocab_size: ids must be below it.
        max_model_len: prompt and completion together, in tokens.
        eos_token_ids: a sequence ends when one of them is sampled; the token is kept.
        seed: of the seeds given to requests that bring none.

    Attributes:
        policy_version: number of updates so far. Only the engine changes it.
        num_synced_bytes: bytes that the latest update sent; 0 if the module is shared.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        seed: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.policy_version = 0
        self.num_synced_bytes = 0
        self._is_counted = False  # whether `policy_version` is that of the coming update
        self._failed_update: str | None = None  # why the latest update failed
        self._seeds = random.Random(seed)
        # One int object per id: a fresh one for each sampled token would be 32 bytes.
        self._shared_ids = list(range(vocab_size))

    @abstractmethod
    async def _sample(self, request: GenerationRequest) -> Completion:
        """Sample one sequence. Many calls wait at one time; the engine batches them."""

    @abstractmethod
    def _load_weights(self, model: PreTrainedModel) -> None:
        """Load the learner's current weights; drop every cache made with older ones.

        Raise an `EngineBusyError` before anything is changed, or not at all.
        """

    @property
    def death(self) -> str | None:
        """Return why the engine is dead, or None while it is alive."""
        return None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that it computes in, or None if that is not known."""
        return None

    def stats(self) -> EngineStats | None:
        """Return counters for metrics, or None if the engine keeps none."""
        return None

    def sleep(self) -> None:
        """Free GPU memory until the next update.

        Raises:
            EngineError: this engine can't.
        """
        raise EngineError(f"A {type(self).__name__} can't sleep.")

    def close(self) -> None:  # noqa: B027 - there may be nothing to free
        """Free what the engine holds. Closing twice, or closing a dead engine, is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        seed: int | None = None,
        affinity: str | None = None,
    ) -> Completion:
        """Sample one sequence. The keyword form of `sample`.

        Args:
            prompt_ids: `[P]`, Python ints.
            max_new_tokens: at least 1; what doesn't fit into `max_model_len` is not sampled.
            temperature, top_p, top_k, min_p, stop_strings: as in `SamplingParams`.
            stop_token_ids: end the sequence as the engine's own `eos_token_ids` do.
            seed: same seed, prompt and weights give the same tokens, whatever else is running; on a
                GPU only in the same batch. By default the next of the engine's own.
            affinity: names the trajectory, as in `GenerationRequest`. `forget` it at its end.

        Raises:
            InvalidRequestError: the request can't be served; names the value.
            EngineDeadError: the engine has stopped serving requests.
            EngineError: the engine failed this request or returned something inconsistent; a retry
                may succeed.
        """
        sampling = SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
            stop_strings=stop_strings,
        )  # fmt: skip
        request = GenerationRequest(
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            seed=self.next_seed() if seed is None else seed,
            sampling=sampling,
            stop_token_ids=tuple(stop_token_ids),
            affinity=affinity,
        )
        return await self.sample(request)

    async def sample(self, request: GenerationRequest) -> Completion:
        """Check the request, sample it, and check the completion. Raises as `generate`."""
        if self._failed_update is not None and self.death is None:
            raise EngineError(
                "The engine refuses requests until a weight update succeeds, as nobody knows which "
                f"weights it holds. The latest update failed: {self._failed_update}"
            )
        check_prompt(
            request.prompt_ids,
            num_checked=request.num_checked_ids,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
        )
        if request.max_new_tokens < 1:
            raise InvalidRequestError(
                f"`max_new_tokens` must be 1 or more, got {request.max_new_tokens}."
            )
        room = self.max_model_len - len(request.prompt_ids)
        stop_token_ids = (*self.eos_token_ids, *request.stop_token_ids)
        request = replace(
            request,
            max_new_tokens=min(request.max_new_tokens, room),
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        )
        completion = await self._sample(request)
        check_completion(completion, request, self.vocab_size)
        shared_ids = [self._shared_ids[token] for token in completion.token_ids]
        return replace(completion, token_ids=shared_ids)

    def forget(self, affinity: str) -> None:  # noqa: B027 - most engines keep nothing
        """Drop what is kept for this trajectory; it has ended."""

    def next_seed(self) -> int:
        """Return the next seed of the engine's own stream, which starts at its `seed`."""
        return self._seeds.getrandbits(31)

    def update_policy(self, model: PreTrainedModel) -> int:
        """Load the learner's current weights into the engine. The learner is only read.

        If an update fails, the engine refuses requests until one succeeds.

        Returns:
            The new `policy_version`.

        Raises:
            WeightSyncError: names or shapes don't fit.
            EngineBusyError: requests are in flight; nothing has changed.
        """
        try:
            self._load_weights(model)
        except EngineBusyError:
            raise
        except BaseException as error:
            self._failed_update = f"{type(error).__name__}: {error}"
            raise
        self._failed_update = None
        self.policy_version, self._is_counted = self.next_version, False
        return self.policy_version

    @property
    def next_version(self) -> int:
        """Return the `policy_version` after the coming update."""
        return self.policy_version + (not self._is_counted)

    def advance_policy_version(self, to_at_least: int | None = None) -> int:
        """Count an update whose weights the engine does not hold yet; return the new version.

        The next `update_policy` brings that version's weights, and does not count again.

        Args:
            to_at_least: raise the version to this one instead, if it is lower.
        """
        if to_at_least is None:
            self.policy_version, self._is_counted = self.policy_version + 1, True
        self.policy_version = max(self.policy_version, to_at_least or 0)
        return self.policy_version

    def rollout(
        self,
        prompt_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        num_generations: int,
        max_new_tokens: int,
        temperature: float = 0.8,
    ) -> RolloutResult:
        """Sample G completions for each of B prompts.

        Args:
            prompt_ids: `[B, P]`, padded on either side.
            attention_mask: `[B, P]`, 1 on real tokens.
            num_generations: G, at least 1.

        Raises:
            InvalidRequestError: shapes differ, or a prompt can't be served.
        """
        rows = prompt_rows(prompt_ids, attention_mask, num_generations)
        completions = run_blocking(self._generate_all(rows, max_new_tokens, temperature))
        return to_tensors(self.tokenizer, prompt_ids, rows, completions)

    async def _generate_all(
        self, rows: list[list[int]], max_new_tokens: int, temperature: float
    ) -> list[Completion]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self.generate(row, max_new_tokens=max_new_tokens, temperature=temperature)
                )
                for row in rows
            ]
        return [task.result() for task in tasks]
