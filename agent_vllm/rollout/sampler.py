"""Sample the turns of a trajectory, whoever decides what follows a turn.

Owns the way from a story to the story with one more turn: the request, its retry, its deadline and
its parsing. Invariant: what ends a turn early is one `StopReason`.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agent_vllm.chat import ChatFormat
from agent_vllm.engines.base import GenerationRequest, RolloutEngine
from agent_vllm.errors import EngineDeadError, EngineError, InvalidRequestError
from agent_vllm.rollout.budget import Budget, Used
from agent_vllm.rollout.status import RolloutStatus
from agent_vllm.rollout.story import Story
from agent_vllm.settings import Limits, SamplingParams
from agent_vllm.tools import Tool, ToolRunner
from agent_vllm.types import Completion, ParsedTurn, Span, SpanKind, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutContext:
    """Hold what all trajectories of one rollout share."""

    engine: RolloutEngine
    sampling: SamplingParams
    limits: Limits
    runner: ToolRunner
    status: RolloutStatus
    started_s: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def time_left_s(self) -> float | None:
        """Return the seconds until the deadline of all trajectories; None without one."""
        deadline_s = self.limits.deadline_s
        return None if deadline_s is None else max(deadline_s - self.elapsed_s(), 0.0)

    def span(self, kind: SpanKind, name: str, start_s: float) -> Span:
        """Return the time from `start_s` until now."""
        return Span(kind=kind, name=name, start_s=start_s, end_s=self.elapsed_s())

    def budget(self, used: Used, turn_started_s: float) -> Budget:
        """Return what is left now of a trajectory's limits."""
        used = replace(used, elapsed_s=self.elapsed_s(), turn_started_s=turn_started_s)
        return Budget(limits=self.limits, max_model_len=self.engine.max_model_len, used=used)

    async def sample(self, request: GenerationRequest) -> Completion:
        """Sample one turn; a request that the engine failed is retried once.

        With the same seed, so that a fault changes nothing of what is sampled, and tokens that lead
        to a fault are not avoided.
        """
        try:
            return await self.engine.sample(request)
        except EngineDeadError:
            raise
        except EngineError:
            self.status.num_retries += 1
            return await self.engine.sample(request)


class TurnFailed(Exception):
    """No turn was sampled, and the trajectory ends."""

    def __init__(self, reason: StopReason, error: str | None = None) -> None:
        super().__init__(error or reason)
        self.reason = reason
        self.error = error


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTurn:
    """Hold a sampled turn as it was read, and the story that ends with it."""

    story: Story
    parsed: ParsedTurn
    is_cut: bool  # by a limit


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSampler:
    """Sample the turns of one trajectory.

    Attributes:
        chat: the format, with the thinking switch set.
        thinking: how it is set; None if it was left alone.
        affinity: names the trajectory; no other rollout has the same.
        seeds: of the trajectory's requests.
    """

    context: RolloutContext
    chat: ChatFormat
    thinking: bool | None
    affinity: str
    seeds: random.Random

    async def sample(
        self,
        story: Story,
        tools: Sequence[Tool],
        *,
        started_s: float,
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
    ) -> NewTurn:
        """Sample the story's next turn.

        Args:
            tools: on offer.
            started_s: when the turn began, in seconds since the rollout did.
            sampling: in place of the rollout's.

        Raises:
            TurnFailed: the engine failed, or a deadline passed.
        """
        time_left_s = self.context.budget(story.used, started_s).turn_time_left_s
        deadline = asyncio.timeout(time_left_s)
        # The whole id list lives no longer than this: a story that waits holds its ids once.
        request = story.request(
            max_new_tokens=max_new_tokens,
            seed=self.seeds.getrandbits(31),
            sampling=sampling or self.context.sampling,
            stop_token_ids=self.chat.end_token_ids,
            affinity=self.affinity,
        )
        try:
            async with deadline:
                completion = await self.context.sample(request)
        except (EngineError, InvalidRequestError) as error:
            raise TurnFailed(StopReason.ENGINE_ERROR, str(error)) from error
        except TimeoutError as error:
            if deadline.expired():
                raise TurnFailed(StopReason.DEADLINE) from error
            raise
        return self._read(story, request, completion, tools, started_s)

    def _read(
        self,
        story: Story,
        request: GenerationRequest,
        completion: Completion,
        tools: Sequence[Tool],
        started_s: float,
    ) -> NewTurn:
        is_cut = completion.finish_reason == "length"
        parsed = self.chat.parse(completion.token_ids, request.prompt_ids, tools, is_cut=is_cut)
        span = self.context.span("model", f"turn {story.used.num_turns}", started_s)
        story = story.plus_turn(request, completion, parsed, span)
        self.context.status.count_turn(story.used.num_turns, len(completion.token_ids))
        return NewTurn(story=story, parsed=parsed, is_cut=is_cut)

    def forget(self) -> None:
        """Drop what the engine keeps for the trajectory; it has ended."""
        self.context.engine.forget(self.affinity)
