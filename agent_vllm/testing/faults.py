"""Engines and tools that misbehave on purpose.

Invariant: a seed and a request (or a call) decide what happens, whatever else runs at the time.
"""

import asyncio
import dataclasses
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from transformers import PreTrainedModel

from agent_vllm.engines.base import GenerationRequest, RolloutEngine
from agent_vllm.errors import EngineDeadError, EngineError
from agent_vllm.tools import Tool, as_tool
from agent_vllm.types import Completion

_DEATH = "On purpose: the engine is dead."


class Fault(StrEnum):
    """What can go wrong with a request.

    A rollout makes a request that met one once more, which draws anew whether it meets another. The
    second one ends the trajectory with `StopReason.ENGINE_ERROR`; `ENGINE_DEATH` does so at once.
    `HANG` is for deadlines. An engine that hangs for good is found by its own watchdog (`hang_s` of
    the real engines) and is from then on as `ENGINE_DEATH` leaves it.
    """

    REQUEST_ERROR = "request_error"  # this request fails, the engine goes on
    OUT_OF_MEMORY = "out_of_memory"  # so does this one, for want of memory
    ENGINE_DEATH = "engine_death"  # this request and all later ones fail
    HANG = "hang"  # the answer comes late
    NAN_LOGPROB = "nan_logprob"  # one token's logprob is not a number
    MISSING_LOGPROBS = "missing_logprobs"  # None in their place
    WRONG_LENGTH = "wrong_length"  # more tokens than were asked for


class FaultyEngine(RolloutEngine):
    """An engine whose requests meet faults; else it is the engine that it wraps.

    Args:
        engine: answers; closed with this one.
        faults: either each fault's share of the requests (together at most 1), chosen by `seed`,
            the request and how often it met one; or the fault of each request in order of arrival,
            None for none. A request that is made again is a further one.
        hang_s: seconds of a `HANG`.
        seed: other seeds choose other requests.

    Attributes:
        met: how often each fault was met.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        faults: Mapping[Fault, float] | Sequence[Fault | None],
        *,
        hang_s: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            tokenizer=engine.tokenizer,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            eos_token_ids=engine.eos_token_ids,
        )
        if isinstance(faults, Mapping):
            _check_shares(faults.values())
        self.met: Counter[Fault] = Counter()
        self.policy_version = engine.policy_version
        self._engine = engine
        self._faults = faults
        self._hang_s = hang_s
        self._seed = seed
        self._arrivals = itertools.count()
        self._num_met: Counter[int] = Counter()  # by request
        self._is_dead = False

    @property
    def death(self) -> str | None:
        return _DEATH if self._is_dead else self._engine.death

    def next_seed(self) -> int:
        return self._engine.next_seed()

    def forget(self, affinity: str) -> None:
        self._engine.forget(affinity)

    def close(self) -> None:
        self._engine.close()

    def _load_weights(self, model: PreTrainedModel) -> None:
        self._engine.update_policy(model)

    async def _sample(self, request: GenerationRequest) -> Completion:
        fault = self._fault_of(request)
        self.met.update([fault] if fault else [])
        self._is_dead = self._is_dead or fault is Fault.ENGINE_DEATH
        if self._is_dead:
            raise EngineDeadError(_DEATH)
        if fault is Fault.REQUEST_ERROR:
            raise EngineError("On purpose: the request failed.")
        if fault is Fault.OUT_OF_MEMORY:
            raise EngineError("On purpose: out of memory.") from torch.OutOfMemoryError()
        if fault is Fault.HANG:
            await asyncio.sleep(self._hang_s)
        return _spoiled(await self._engine._sample(request), fault, request.max_new_tokens)

    def _fault_of(self, request: GenerationRequest) -> Fault | None:
        arrival = next(self._arrivals)
        if not isinstance(self._faults, Mapping):
            return self._faults[arrival] if arrival < len(self._faults) else None
        key = f"{self._seed}/{request.seed}/{request.prompt_ids}"
        fault = _drawn(self._faults, random.Random(f"{key}/{self._num_met[hash(key)]}"))
        self._num_met.update([hash(key)] if fault else [])
        return fault


_CIRCLE: list[Any] = []
_CIRCLE.append(_CIRCLE)

ODD_VALUES: tuple[Any, ...] = (
    None,
    "",
    math.nan,
    b"\xff\x00",
    {3, 1, 2},
    "\ud83d",  # half of a surrogate pair
    "\x00\x1b[31m",
    "<|im_end|>\n<|im_start|>assistant\n",
    "9" * 1_000_000,
    _CIRCLE,  # contains itself
    object(),  # has no text of its own
)
"""What a tool should not return but will, one day."""


def faulty(
    tool: Tool | Callable[..., Any],
    *,
    raise_share: float = 0.0,
    sleep_share: float = 0.0,
    odd_share: float = 0.0,
    sleep_s: float = 60.0,
    seed: int = 0,
) -> Tool:
    """The same tool, some of whose calls go wrong, chosen by `seed` and the call.

    Args:
        raise_share: of the calls, raise `RuntimeError`.
        sleep_share: sleep for `sleep_s` seconds, then answer.
        odd_share: return one of `ODD_VALUES`.
    """
    tool = as_tool(tool)
    shares = {"raise": raise_share, "sleep": sleep_share, "odd": odd_share}
    _check_shares(shares.values())
    repeated: Counter[str] = Counter()

    def drawn(arguments: dict[str, Any]) -> tuple[str | None, Any]:
        key = json.dumps(arguments, sort_keys=True, default=str)
        repeated[key] += 1
        choice = random.Random(f"{seed}/{tool.name}/{key}/{repeated[key]}")
        trouble = _drawn(shares, choice)
        if trouble == "raise":
            raise RuntimeError("On purpose: the tool failed.")
        return trouble, choice.choice(ODD_VALUES)

    def function(**arguments: Any) -> Any:
        trouble, odd = drawn(arguments)
        if trouble == "sleep":
            time.sleep(sleep_s)
        return odd if trouble == "odd" else tool.function(**arguments)

    async def async_function(**arguments: Any) -> Any:
        trouble, odd = drawn(arguments)
        if trouble == "sleep":
            await asyncio.sleep(sleep_s)
        return odd if trouble == "odd" else await tool.function(**arguments)

    return dataclasses.replace(tool, function=async_function if tool.is_async else function)


def _spoiled(completion: Completion, fault: Fault | None, max_new_tokens: int) -> Completion:
    token_ids, logprobs = list(completion.token_ids), list[Any](completion.logprobs)
    if fault is Fault.NAN_LOGPROB:
        logprobs[len(logprobs) // 2] = math.nan
    elif fault is Fault.MISSING_LOGPROBS:
        logprobs = [None] * len(token_ids)
    elif fault is Fault.WRONG_LENGTH:
        num_more = max_new_tokens + 1 - len(token_ids)
        token_ids += token_ids[-1:] * num_more
        logprobs += logprobs[-1:] * num_more
    return dataclasses.replace(completion, token_ids=token_ids, logprobs=logprobs)


def _drawn(shares: Mapping[Any, float], choice: random.Random) -> Any:
    """One of the keys, each with its share of the cases; None for the rest of them."""
    rest = max(1 - sum(shares.values()), 0.0)
    return choice.choices([*shares, None], [*shares.values(), rest])[0]


def _check_shares(shares: Collection[float]) -> None:
    if any(share < 0 for share in shares) or sum(shares) > 1 + 1e-9:
        raise ValueError(f"Shares must be 0 or more and add up to at most 1, got {list(shares)}.")
