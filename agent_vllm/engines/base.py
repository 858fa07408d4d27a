"""The engine interface: token ids in, sampled token ids with their logprobs out.

Owns what all engines share: which requests and completions are valid, and the tensor interface on
top of single sequences. Knows nothing of chats or tools.
"""

import array
import asyncio
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.blocking import run_blocking
from agent_vllm.engines.models import pad_token_id
from agent_vllm.errors import EngineError, InvalidRequestError
from agent_vllm.settings import SamplingParams
from agent_vllm.training import pad_rows
from agent_vllm.types import Completion

_NEUTRAL = SamplingParams()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerationRequest:
    """Ask for one sequence.

    Engines get requests checked: `RolloutEngine.sample` has cut `max_new_tokens` to what fits and
    put the engine's own end tokens among `stop_token_ids`.

    Attributes:
        num_checked_ids: leading prompt ids that this engine checked in an earlier turn; they are
            not checked again.
        affinity: names the trajectory; an engine of several servers keeps its requests on one,
            where their prefix is cached.
    """

    prompt_ids: list[int]  # [P]
    max_new_tokens: int
    seed: int
    sampling: SamplingParams = _NEUTRAL
    stop_token_ids: tuple[int, ...] = ()
    num_checked_ids: int = 0
    affinity: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """What `RolloutEngine.rollout` returns; the G rows of a prompt stand together.

    Legend: B prompts, G generations each, P padded prompt length, R longest completion.
    """

    output_ids: torch.Tensor  # [B*G, P+R], the prompts as they were given, then the completions
    completion_ids: torch.Tensor  # [B*G, R], right-padded
    per_token_logps: torch.Tensor  # [B*G, R] float32, 0.0 on padding
    completion_mask: torch.Tensor  # [B*G, R], 1 on sampled tokens, by length
    prompt_lens: torch.Tensor  # [B*G], real lengths
    completions: list[str]  # B*G


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counts of what an engine has done since it was built."""

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
    """Samples sequences with one policy whose weights can be replaced.

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
        self._seeds = random.Random(seed)
        # One int object an id: a fresh one for each sampled token would be 32 bytes.
        self._shared_ids = list(range(vocab_size))

    @abstractmethod
    async def _sample(self, request: GenerationRequest) -> Completion:
        """Sample one sequence. Many calls wait at one time; the engine batches them."""

    @abstractmethod
    def _load_weights(self, model: PreTrainedModel) -> None:
        """Load the learner's current weights; drop every cache made with older ones."""

    @property
    def death(self) -> str | None:
        """Why the engine is dead, or None while it is alive."""
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
            seed: same seed, prompt and weights give the same tokens, whatever else is running. By
                default the next of the engine's own.
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
        self._check_prompt(request.prompt_ids, request.num_checked_ids)
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
        _check_completion(completion, request, self.vocab_size)
        shared_ids = [self._shared_ids[token] for token in completion.token_ids]
        return replace(completion, token_ids=shared_ids)

    def forget(self, affinity: str) -> None:  # noqa: B027 - most engines keep nothing
        """Drop what is kept for this trajectory; it has ended."""

    def next_seed(self) -> int:
        """A fresh seed from the engine's own stream, which its `seed` began."""
        return self._seeds.getrandbits(31)

    def update_policy(self, model: PreTrainedModel) -> int:
        """Load the learner's current weights into the engine. The learner is only read.

        Returns:
            The new `policy_version`.

        Raises:
            WeightSyncError: names or shapes don't fit.
            EngineBusyError: requests are in flight.
        """
        self._load_weights(model)
        return self.advance_policy_version()

    def advance_policy_version(self, to_at_least: int | None = None) -> int:
        """Count an update whose weights the engine does not hold yet; return the new version.

        Args:
            to_at_least: raise the version to this one instead, if it is lower.
        """
        floor = self.policy_version + 1 if to_at_least is None else to_at_least
        self.policy_version = max(self.policy_version, floor)
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
        if prompt_ids.ndim != 2 or prompt_ids.shape != attention_mask.shape:
            raise InvalidRequestError(
                "`prompt_ids` and `attention_mask` must both be [B, P], got "
                f"{list(prompt_ids.shape)} and {list(attention_mask.shape)}."
            )
        if num_generations < 1:
            raise InvalidRequestError(
                f"`num_generations` must be 1 or more, got {num_generations}."
            )
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(prompt_ids, attention_mask, strict=True)
        ]
        rows = [prompt for prompt in prompts for _ in range(num_generations)]
        completions = run_blocking(self._generate_all(rows, max_new_tokens, temperature))
        return self._to_tensors(prompt_ids, rows, completions, num_generations)

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

    def _to_tensors(
        self,
        prompt_ids: torch.Tensor,
        rows: list[list[int]],
        completions: list[Completion],
        num_generations: int,
    ) -> RolloutResult:
        device = prompt_ids.device
        pad_id = pad_token_id(self.tokenizer)
        token_ids = [completion.token_ids for completion in completions]
        completion_ids = pad_rows(token_ids, pad_id).to(device)
        prompts = prompt_ids.repeat_interleave(num_generations, dim=0)
        return RolloutResult(
            output_ids=torch.cat([prompts, completion_ids], dim=1),
            completion_ids=completion_ids,
            per_token_logps=pad_rows([c.logprobs for c in completions], 0.0).to(device),
            completion_mask=pad_rows([[1] * len(ids) for ids in token_ids], 0).to(device),
            prompt_lens=torch.tensor([len(row) for row in rows], device=device),
            completions=self.tokenizer.batch_decode(token_ids, skip_special_tokens=True),
        )

    def _check_prompt(self, prompt_ids: Sequence[int], num_checked: int) -> None:
        try:
            ids = array.array("q", prompt_ids[num_checked:] if num_checked else prompt_ids)
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(
                f"`prompt_ids` must be a list of ints, got {type(prompt_ids).__name__}: {error}."
            ) from error
        if len(prompt_ids) == 0:
            raise InvalidRequestError("`prompt_ids` must hold at least one token, got none.")
        lowest, highest = min(ids, default=0), max(ids, default=0)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequestError(
                f"Token id {wrong} is out of the engine's vocabulary of {self.vocab_size}. Were "
                "tokens added to the tokenizer after the model was made? Resize the model's "
                "embeddings before the engine is built."
            )
        if len(prompt_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"The prompt has {len(prompt_ids)} tokens; with `max_model_len` "
                f"{self.max_model_len} none is left to sample."
            )


def ends_on_string(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], strings: Sequence[str]
) -> bool:
    """Whether the text of the ids has one of the strings at its end, in the last token's reach."""
    if not strings:
        return False
    # Every token but those inside a character adds at least one; a character has up to four bytes.
    tail = list(token_ids[-4 * max(map(len, strings)) - 4 :])
    text = tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(string in text for string in strings)


def _check_completion(completion: Completion, request: GenerationRequest, vocab_size: int) -> None:
    if len(completion.token_ids) > request.max_new_tokens:
        raise EngineError(
            f"The engine sampled {len(completion.token_ids)} tokens where {request.max_new_tokens} "
            "were asked for."
        )
    ids = completion.token_ids
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise EngineError(f"The engine sampled an id out of its vocabulary of {vocab_size}.")
    if None in completion.logprobs or not all(map(math.isfinite, completion.logprobs)):
        index, logprob = next(
            (index, logprob)
            for index, logprob in enumerate(completion.logprobs)
            if logprob is None or not math.isfinite(logprob)
        )
        raise EngineError(
            f"The engine gave logprob {logprob} for token {index} of "
            f"{len(completion.logprobs)}; the completion is dropped. Are the weights finite?"
        )
