"""Define the values that flow through a rollout. They own their shapes and nothing else.

Invariant: a token has a logprob if and only if the engine sampled it. Ids, mask and logprobs of a
trajectory are views of its turns and can't drift apart.

Legend for length comments: P prompt tokens, C completion tokens, N tokens of one segment,
T turns, K calls of one turn.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from agent_vllm.spans import covered_s


class StopReason(StrEnum):
    """Name the one thing that ended a trajectory."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    TURN_LENGTH = "turn_length"
    COMPLETION_BUDGET = "completion_budget"
    CONTEXT_FULL = "context_full"
    DEADLINE = "deadline"
    INVALID_CALLS = "invalid_calls"
    ENVIRONMENT_DONE = "environment_done"
    ENGINE_ERROR = "engine_error"
    USER_ERROR = "user_error"
    ENVIRONMENT_ERROR = "environment_error"
    AGENT_ERROR = "agent_error"

    @property
    def is_truncated(self) -> bool:
        """Return whether the model was cut off in its turn, or never got a turn that was due."""
        return self in _TRUNCATING

    @property
    def is_failure(self) -> bool:
        """Return whether the engine, user, environment or agent failed, whatever the model did."""
        return self in _FAILURES


_FAILURES = frozenset(
    {
        StopReason.ENGINE_ERROR,
        StopReason.USER_ERROR,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.AGENT_ERROR,
    }
)

_TRUNCATING = _FAILURES | {
    StopReason.TURN_LENGTH,
    StopReason.COMPLETION_BUDGET,
    StopReason.CONTEXT_FULL,
    StopReason.DEADLINE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Hold what an engine sampled for one prompt, the sampled end token included.

    `policy_version` counts the engine's weight updates. If an update came in the middle it is that
    of the oldest token, and `token_versions` has each token's own.
    """

    token_ids: list[int]  # [N]
    logprobs: list[float]  # [N], of the distribution sampled from
    finish_reason: Literal["stop", "length"]
    policy_version: int
    token_versions: list[int] | None = None  # [N], None where all are `policy_version`

    def __post_init__(self) -> None:
        _check_same_length("token_ids", self.token_ids, "logprobs", self.logprobs)
        if self.token_versions is not None:
            _check_same_length("token_ids", self.token_ids, "token_versions", self.token_versions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Hold tokens of one origin: sampled (with logprobs), or written by template, tool or user.

    >>> Segment(token_ids=[7, 8], logprobs=[-0.1, -0.2], policy_version=3).is_sampled
    True
    >>> Segment(token_ids=[9]).is_sampled
    False
    """

    token_ids: list[int]  # [N]
    logprobs: list[float] | None = None  # [N], or None where nothing was sampled
    policy_version: int | None = None  # of its oldest token
    token_versions: list[int] | None = None  # [N], None where all are `policy_version`

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            _check_same_length("token_ids", self.token_ids, "logprobs", self.logprobs)
        if self.token_versions is not None:
            _check_same_length("token_ids", self.token_ids, "token_versions", self.token_versions)

    @property
    def is_sampled(self) -> bool:
        return self.logprobs is not None

    @property
    def versions(self) -> list[int | None]:  # [N]
        """Return each token's policy version; None where not sampled or not known."""
        if self.token_versions is not None:
            return [*self.token_versions]
        return [self.policy_version] * len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """Hold one call as the model drafted it. If `error` is set it is malformed and must not run.

    `arguments` is None if the model gave none, which is not the same as giving `{}`. `id` is the
    one that the model wrote, if any.
    """

    name: str
    arguments: dict[str, Any] | None
    error: str | None = None
    id: str | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the call as an entry of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments or {}}
        call = {"type": "function", "function": function}
        return call if self.id is None else {**call, "id": self.id}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """Hold the result of one call, as text for the model.

    `status`: "ok"; "failed" (the tool ran and raised, or timed out); "invalid" (it never ran:
    malformed call, unknown tool, arguments that don't fit).
    """

    name: str
    content: str
    status: Literal["ok", "failed", "invalid"]
    call_id: str | None = None  # of the call, if the model wrote one

    @property
    def message(self) -> dict[str, Any]:
        return {"role": "tool", "name": self.name, "content": self.content}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """Hold one assistant turn as read by a parser.

    `message` goes into the conversation. `ChatFormat.parse` sets `text`, the turn's raw text
    without its end token; a parser may leave it out.
    """

    message: dict[str, Any]
    calls: list[ToolCall]
    text: str = ""


SpanKind = Literal["model", "tool", "user"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Hold a time that a trajectory spent waiting, in seconds since its rollout began.

    A model span is one turn, a tool span one call, a user span one reply of the simulated user.
    Calls of one turn run side by side.
    """

    kind: SpanKind
    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRecord:
    """Hold one tool call with its result and its time."""

    call: ToolCall
    result: ToolResult
    span: Span | None = None  # kind "tool"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Hold one assistant turn and what followed it: tokens, text, calls and time together."""

    segment: Segment  # the sampled tokens, end token included; may be empty
    text: str  # raw, without the end token
    span: Span | None = None  # kind "model"
    calls: list[CallRecord] = field(default_factory=list)  # [K], in call order
    user_span: Span | None = None  # kind "user": waiting for the simulated user's reply
    suffix: Segment | None = None  # written by template, tools or user; None if the story ended

    def __post_init__(self) -> None:
        if not self.segment.is_sampled:
            raise ValueError("`segment` must be sampled, got one without logprobs.")
        if self.suffix is not None and self.suffix.is_sampled:
            raise ValueError("`suffix` must not be sampled, got one with logprobs.")

    @property
    def spans(self) -> list[Span]:
        """Return the spans of model, calls and user, in this order."""
        spans = [self.span, *(record.span for record in self.calls), self.user_span]
        return [span for span in spans if span is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """Hold one sample's whole story: the prompt, then turn by turn what was sampled and observed.

    Example, a turn that calls a tool (end token E), its observation, and the answer:

    >>> trajectory = Trajectory(
    ...     prompt_ids=[1, 2],
    ...     turns=[
    ...         Turn(
    ...             segment=Segment(token_ids=[3, 9], logprobs=[-0.5, -0.1], policy_version=0),
    ...             text="<call>",
    ...             suffix=Segment(token_ids=[4, 5]),
    ...         ),
    ...         Turn(
    ...             segment=Segment(token_ids=[6, 9], logprobs=[-0.3, -0.2], policy_version=0),
    ...             text="It is 3.",
    ...         ),
    ...     ],
    ...     stop_reason=StopReason.ANSWERED,
    ... )
    >>> trajectory.completion_ids
    [3, 9, 4, 5, 6, 9]
    >>> trajectory.completion_mask
    [1, 1, 0, 0, 1, 1]
    >>> trajectory.logprobs
    [-0.5, -0.1, 0.0, 0.0, -0.3, -0.2]
    """

    prompt_ids: list[int]  # [P]
    turns: list[Turn]  # [T]
    stop_reason: StopReason
    messages: list[dict[str, Any]] = field(default_factory=list)  # the whole conversation
    num_prompt_messages: int = 0
    thinking: bool | None = None  # None if the template has no switch or it was left alone
    error: str | None = None
    # What an agent of its own sampled beside this conversation, after it left it. A branch's prompt
    # holds all that is told elsewhere: each sampled token is in one turn, of one of them.
    branches: list["Trajectory"] = field(default_factory=list)
    output: Any = None  # what such an agent returned or printed

    @classmethod
    def from_segments(
        cls,
        *,
        prompt_ids: list[int],
        segments: Iterable[Segment],
        stop_reason: StopReason,
        messages: Iterable[dict[str, Any]] = (),
        num_prompt_messages: int = 0,
        thinking: bool | None = None,
        error: str | None = None,
    ) -> "Trajectory":
        """Build a trajectory from flat segments; its turns have no text, calls or times.

        Raises:
            ValueError: an observed segment doesn't follow a sampled one.
        """
        return cls(
            prompt_ids=prompt_ids,
            turns=[
                Turn(segment=segment, text="", suffix=suffix)
                for segment, suffix in _in_turns(segments)
            ],
            stop_reason=stop_reason,
            messages=list(messages),
            num_prompt_messages=num_prompt_messages,
            thinking=thinking,
            error=error,
        )

    # ---- views: tokens ----

    @property
    def segments(self) -> list[Segment]:
        """Return each turn's sampled segment and what was written after it, in order."""
        return [
            segment
            for turn in self.turns
            for segment in (turn.segment, turn.suffix)
            if segment is not None
        ]

    @property
    def completion_ids(self) -> list[int]:  # [C]
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def completion_mask(self) -> list[int]:  # [C], 1 where sampled
        return [
            bit
            for segment in self.segments
            for bit in [int(segment.is_sampled)] * len(segment.token_ids)
        ]

    @property
    def logprobs(self) -> list[float]:  # [C], 0.0 where not sampled
        return [
            logprob
            for segment in self.segments
            for logprob in segment.logprobs or [0.0] * len(segment.token_ids)
        ]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.segment.token_ids) for turn in self.turns)

    @property
    def num_branch_tokens(self) -> int:
        """Return how many tokens were sampled on the branches."""
        return sum(branch.num_sampled_tokens for branch in self.branches)

    @property
    def policy_versions(self) -> list[int]:
        """Return the engine's policy version of each sampled segment that has one, in order."""
        versions = [turn.segment.policy_version for turn in self.turns]
        return [version for version in versions if version is not None]

    @property
    def token_versions(self) -> list[int | None]:  # [C], None where not sampled
        """Return the engine's policy version of each token."""
        return [version for segment in self.segments for version in segment.versions]

    # ---- views: turns, calls and times ----

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def turn_outputs(self) -> list[str]:  # [T]
        """Return the raw text of each turn, without its end token."""
        return [turn.text for turn in self.turns]

    @property
    def calls(self) -> list[CallRecord]:
        return [record for turn in self.turns for record in turn.calls]

    @property
    def tool_results(self) -> list[ToolResult]:
        return [record.result for record in self.calls]

    @property
    def spans(self) -> list[Span]:
        return [span for turn in self.turns for span in turn.spans]

    def seconds(self, kind: SpanKind) -> float:
        """Return how long it waited for the model, tools or user; overlapping calls count once."""
        return covered_s((span.start_s, span.end_s) for span in self.spans if span.kind == kind)

    # ---- views: the conversation ----

    @property
    def completion_messages(self) -> list[dict[str, Any]]:
        return self.messages[self.num_prompt_messages :]

    @property
    def unfinished(self) -> bool:
        """Return False if the model gave its own answer or the environment was done."""
        return self.stop_reason not in (StopReason.ANSWERED, StopReason.ENVIRONMENT_DONE)


Messages = Sequence[Mapping[str, Any]]


def _in_turns(segments: Iterable[Segment]) -> Iterator[tuple[Segment, Segment | None]]:
    """Pair each sampled segment with the observed one after it, if there is one."""
    sampled: Segment | None = None
    for index, segment in enumerate(segments):
        if segment.is_sampled:
            if sampled is not None:
                yield sampled, None
            sampled = segment
        elif sampled is None:
            raise ValueError(
                f"An observed segment must follow a sampled one, got segment {index}. Join "
                "neighbours, or put it into `prompt_ids`."
            )
        else:
            yield sampled, segment
            sampled = None
    if sampled is not None:
        yield sampled, None


def _check_same_length(name: str, values: Sequence, other_name: str, others: Sequence) -> None:
    if len(values) != len(others):
        raise ValueError(
            f"`{name}` and `{other_name}` must have one length, got {len(values)} and "
            f"{len(others)}."
        )
