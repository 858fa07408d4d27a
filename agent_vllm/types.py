"""The values that flow through a rollout. They own their shapes and nothing else.

Invariant: a token has a logprob if and only if the engine sampled it; ids, mask and logprobs of a
trajectory are views of its segments and can't drift apart.

Legend for length comments: P prompt tokens, C completion tokens, N tokens of one segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from agent_vllm.spans import covered_s


class StopReason(StrEnum):
    """What ended a trajectory."""

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

    @property
    def is_truncated(self) -> bool:
        """True where the model was cut off in its turn or never got the turn it was due."""
        return self in _TRUNCATING

    @property
    def is_failure(self) -> bool:
        """True where engine or user failed: nothing is known of what the model did."""
        return self in (StopReason.ENGINE_ERROR, StopReason.USER_ERROR)


_TRUNCATING = frozenset(
    {
        StopReason.TURN_LENGTH,
        StopReason.COMPLETION_BUDGET,
        StopReason.CONTEXT_FULL,
        StopReason.DEADLINE,
        StopReason.ENGINE_ERROR,
        StopReason.USER_ERROR,
    }
)


_TOOL_TIMEOUT_S = 30.0

_NESTED = (  # the first is part of what the second bounds
    ("tool_timeout_s", "turn_deadline_s"),
    ("tool_timeout_s", "deadline_s"),
    ("turn_deadline_s", "deadline_s"),
    ("max_new_tokens", "max_completion_tokens"),
    ("max_tool_result_tokens", "max_completion_tokens"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a trajectory may use up. The tightest limit wins; `None` means no limit of that kind.

    Attributes:
        max_turns: assistant turns; 0 means that the model is never asked. Calls drafted in the last
            turn still run, and their results close the trajectory.
        max_new_tokens: sampled tokens in one turn.
        max_completion_tokens: sampled and observed tokens together, after the prompt.
        max_tool_rounds: rounds of tool calls; calls drafted after that stay unanswered
            (TRL's `max_tool_calling_iterations`).
        max_invalid_calls: calls in a row that could not run (malformed, unknown, bad arguments).
        max_tool_result_tokens: tokens of one tool result; longer ones are cut and marked.
        tool_timeout_s: seconds for one tool call.
        turn_deadline_s: seconds for one turn: its sampling, and its tools or the user's reply.
            Sampling past it is given up, which ends the trajectory; calls past it are answered as
            timed out, and the next turn has time of its own.
        deadline_s: seconds from the start of the rollout, for each trajectory and so for the whole
            batch: all of them begin together, and waiting for a place in the engine counts. A turn
            that is being sampled then is given up, a call is answered as timed out; the trajectory
            keeps its earlier turns and ends as `StopReason.DEADLINE`.

    Raises:
        ValueError: a value that is no limit, or one that can never be reached, as a tighter one
            always comes first (a turn's deadline longer than the rollout's). The default of
            `tool_timeout_s` gives way instead.
    """

    max_turns: int = 16
    max_new_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_tool_rounds: int | None = None
    max_invalid_calls: int | None = None
    max_tool_result_tokens: int | None = None
    tool_timeout_s: float | None = _TOOL_TIMEOUT_S
    turn_deadline_s: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tool_rounds"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"`{name}` must be 0 or more, got {value}.")
        for name in (
            "max_new_tokens",
            "max_completion_tokens",
            "max_invalid_calls",
            "max_tool_result_tokens",
            "tool_timeout_s",
            "turn_deadline_s",
            "deadline_s",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(
                    f"`{name}` must be more than 0, got {value}. Use None for no limit."
                )
        self._check_that_each_can_be_reached()

    def _check_that_each_can_be_reached(self) -> None:
        for name, tighter in _NESTED:
            value, bound = getattr(self, name), getattr(self, tighter)
            is_default = name == "tool_timeout_s" and value == _TOOL_TIMEOUT_S
            if value is not None and bound is not None and value > bound and not is_default:
                raise ValueError(
                    f"`{name}` must be at most `{tighter}`, got {value} and {bound}: it can't be "
                    f"reached. Lower `{name}` or raise `{tighter}`."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine sampled for one prompt; the sampled end token is in it.

    `policy_version` counts the engine's weight updates; the tokens were sampled with that one.
    """

    token_ids: list[int]  # [N]
    logprobs: list[float]  # [N], of the distribution sampled from
    finish_reason: Literal["stop", "length"]
    policy_version: int

    def __post_init__(self) -> None:
        _check_same_length("token_ids", self.token_ids, "logprobs", self.logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A run of tokens with one origin: sampled (has logprobs) or written by template or tool.

    >>> Segment(token_ids=[7, 8], logprobs=[-0.1, -0.2], policy_version=3).is_sampled
    True
    >>> Segment(token_ids=[9]).is_sampled
    False
    """

    token_ids: list[int]  # [N]
    logprobs: list[float] | None = None  # [N], or None where nothing was sampled
    policy_version: int | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            _check_same_length("token_ids", self.token_ids, "logprobs", self.logprobs)

    @property
    def is_sampled(self) -> bool:
        return self.logprobs is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call as the model drafted it. With `error` set it could not be read and must not run.

    `arguments` is None where the model gave none, which is not the same as giving `{}`. `id` is set
    where the model wrote one.
    """

    name: str
    arguments: dict[str, Any] | None
    error: str | None = None
    id: str | None = None

    def as_message(self) -> dict[str, Any]:
        """An entry of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments or {}}
        call = {"type": "function", "function": function}
        return call if self.id is None else {**call, "id": self.id}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What a call came to, as text for the model.

    `status`: "ok"; "failed" (the tool ran and raised, or ran out of time); "invalid" (it never ran:
    malformed call, unknown tool, arguments that don't fit).
    """

    name: str
    content: str
    status: Literal["ok", "failed", "invalid"]
    call_id: str | None = None  # of the call, where the model wrote one

    @property
    def message(self) -> dict[str, Any]:
        return {"role": "tool", "name": self.name, "content": self.content}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """One assistant turn, read: `message` is what goes into the conversation."""

    message: dict[str, Any]
    calls: list[ToolCall]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Time that a trajectory spent waiting, in seconds since its rollout began.

    A model span is one turn; a tool span is one call, and calls of one turn run side by side.
    """

    kind: Literal["model", "tool"]
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One sample's whole story: the prompt, then what was sampled and what was observed.

    Example, a turn that calls a tool (end token E), its observation, and the answer:

    >>> trajectory = Trajectory(
    ...     prompt_ids=[1, 2],
    ...     segments=[
    ...         Segment(token_ids=[3, 9], logprobs=[-0.5, -0.1], policy_version=0),
    ...         Segment(token_ids=[4, 5]),
    ...         Segment(token_ids=[6, 9], logprobs=[-0.3, -0.2], policy_version=0),
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
    segments: list[Segment]
    stop_reason: StopReason
    messages: list[dict[str, Any]] = field(default_factory=list)  # the whole conversation
    num_prompt_messages: int = 0
    turn_outputs: list[str] = field(default_factory=list)  # raw text of each assistant turn
    tool_results: list[ToolResult] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    thinking: bool | None = None  # None where the template has no switch or it was left alone
    error: str | None = None

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
    def logprobs(self) -> list[float]:  # [C], 0.0 where nothing was sampled
        return [
            logprob
            for segment in self.segments
            for logprob in segment.logprobs or [0.0] * len(segment.token_ids)
        ]

    @property
    def completion_messages(self) -> list[dict[str, Any]]:
        return self.messages[self.num_prompt_messages :]

    @property
    def unfinished(self) -> bool:
        """True unless the model came to an answer of its own or the environment was done."""
        return self.stop_reason not in (StopReason.ANSWERED, StopReason.ENVIRONMENT_DONE)

    @property
    def num_turns(self) -> int:
        return len(self.turn_outputs)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments if segment.is_sampled)

    @property
    def policy_versions(self) -> list[int]:
        """The engine's policy version of each sampled segment, in order."""
        return [s.policy_version for s in self.segments if s.policy_version is not None]

    def seconds(self, kind: Literal["model", "tool"]) -> float:
        """Time that it waited for the model or for tools; calls side by side count once."""
        return covered_s((span.start_s, span.end_s) for span in self.spans if span.kind == kind)


Messages = Sequence[Mapping[str, Any]]


def _check_same_length(name: str, values: Sequence, other_name: str, others: Sequence) -> None:
    if len(values) != len(others):
        raise ValueError(
            f"`{name}` and `{other_name}` must have one length, got {len(values)} and "
            f"{len(others)}."
        )
