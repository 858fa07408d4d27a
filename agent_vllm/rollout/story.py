"""Hold one conversation as it grows: its prompt, then turn by turn ids and messages.

Knows no engine, no clock and no limits. Invariants: a story is a value, so whoever keeps an earlier
one can go on from it, and a request's prompt is all ids of the story.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent_vllm.engines.request import GenerationRequest
from agent_vllm.rollout.budget import Used
from agent_vllm.settings import SamplingParams
from agent_vllm.types import (
    CallRecord,
    Completion,
    Messages,
    ParsedTurn,
    Segment,
    Span,
    StopReason,
    Trajectory,
    Turn,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """Hold a conversation so far. Begin one with `Story.begin`.

    Attributes:
        num_checked_ids: of all ids so far, checked by the engine.
        last_token_id: the last id before a suffix; None before the first turn.
    """

    prompt_ids: list[int]  # [P]
    messages: list[dict[str, Any]]
    num_prompt_messages: int
    used: Used
    turns: list[Turn] = field(default_factory=list)  # [T]
    num_checked_ids: int = 0
    last_token_id: int | None = None

    @classmethod
    def begin(cls, prompt_ids: Sequence[int], messages: Messages) -> "Story":
        """Return the story that begins with these messages and their ids."""
        return cls(
            prompt_ids=list(prompt_ids),
            messages=[dict(message) for message in messages],
            num_prompt_messages=len(messages),
            used=Used(num_prompt_tokens=len(prompt_ids)),
        )

    def without_turns(self, num_turns: int) -> "Story":
        """Return the same conversation with its first turns as part of the prompt."""
        if num_turns == 0:
            return self
        head = replace(self, turns=self.turns[:num_turns])
        is_reply = [message["role"] == "assistant" for message in self.messages]
        replies = [i for i in range(self.num_prompt_messages, len(is_reply)) if is_reply[i]]
        return replace(
            self,
            prompt_ids=head.ids(),
            num_prompt_messages=replies[num_turns],
            turns=self.turns[num_turns:],
        )

    def ids(self) -> list[int]:
        """Put all ids so far together, which is done once per turn."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.segment.token_ids
            ids += turn.suffix.token_ids if turn.suffix is not None else ()
        return ids

    def request(
        self,
        *,
        max_new_tokens: int,
        seed: int,
        sampling: SamplingParams,
        stop_token_ids: tuple[int, ...],
        affinity: str,
    ) -> GenerationRequest:
        """Return the request for the next turn."""
        return GenerationRequest(
            prompt_ids=self.ids(),
            num_checked_ids=self.num_checked_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            stop_token_ids=stop_token_ids,
            affinity=affinity,
        )

    def plus_turn(
        self, request: GenerationRequest, completion: Completion, parsed: ParsedTurn, span: Span
    ) -> "Story":
        """Add a sampled turn."""
        segment = Segment(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            policy_version=completion.policy_version,
            token_versions=completion.token_versions,
        )
        return replace(
            self,
            turns=[*self.turns, Turn(segment=segment, text=parsed.text, span=span)],
            messages=[*self.messages, parsed.message],
            used=self.used.plus_turn(len(segment.token_ids)),
            num_checked_ids=len(request.prompt_ids) + len(segment.token_ids),
            last_token_id=[*request.prompt_ids[-1:], *segment.token_ids][-1],
        )

    def plus_calls(self, calls: Sequence[CallRecord]) -> "Story":
        """Add the calls that the last turn made; their results aren't shown yet."""
        story = self._with_last_turn(calls=list(calls))
        return replace(story, used=self.used.plus_tool_round([call.result for call in calls]))

    def plus_user_span(self, span: Span) -> "Story":
        """Add the time in which the simulated user thought about the last turn."""
        return self._with_last_turn(user_span=span)

    def plus_suffix(self, ids: list[int], messages: Messages) -> "Story":
        """Add what template, tools or user wrote after the last turn."""
        story = self._with_last_turn(suffix=Segment(token_ids=ids))
        return replace(
            story,
            messages=[*self.messages, *map(dict, messages)],
            used=self.used.plus_suffix(len(ids)),
        )

    def _with_last_turn(self, **changes: Any) -> "Story":
        return replace(self, turns=[*self.turns[:-1], replace(self.turns[-1], **changes)])

    def trajectory(
        self, stop_reason: StopReason, *, thinking: bool | None, error: str | None
    ) -> Trajectory:
        """Return the story as it ended."""
        return Trajectory(
            prompt_ids=self.prompt_ids,
            turns=self.turns,
            stop_reason=stop_reason,
            messages=self.messages,
            num_prompt_messages=self.num_prompt_messages,
            thinking=thinking,
            error=error,
        )
