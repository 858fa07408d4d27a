"""Check the settings of a rollout: how tokens are sampled, and what a trajectory may use.

Invariant: values are checked when built, so whoever gets one needs no checks of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_vllm.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Say how tokens are sampled. The defaults leave the model's distribution as it is.

    Every engine scales by the temperature, then filters in the order `min_p`, `top_k`, `top_p`,
    each on what the one before it kept. Logprobs are those of what is left.

    Attributes:
        temperature: 0 is greedy; filters are ignored, and logprobs are those of temperature 1.
        top_p: in (0, 1]; 1 is off.
        top_k: 0 is off.
        min_p: in [0, 1]; 0 is off.
        stop_strings: end a turn once its text contains one of them. The tokens that spell it stay.

    Raises:
        InvalidRequestError: a value is out of range; names it. It is also a `ValueError`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_strings: Sequence[str] = ()  # kept as a tuple

    def __post_init__(self) -> None:
        # vLLM raises temperatures below 0.01 to 0.01
        _check_range("temperature", self.temperature, self._is_temperature(), "0 or >= 0.01")
        _check_range("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _check_range("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check_range("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        strings = self.stop_strings
        is_list = not isinstance(strings, str) and all(strings)
        _check_range("stop_strings", repr(strings), is_list, "a list of non-empty strings")
        object.__setattr__(self, "stop_strings", tuple(strings))

    def _is_temperature(self) -> bool:
        return self.temperature == 0 or self.temperature >= 0.01


def _check_range(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise InvalidRequestError(f"`{name}` must be {wanted}, got {value}.")


_DEFAULT_TOOL_TIMEOUT_S = 30.0

_NESTED = (  # the first is part of what the second bounds
    ("tool_timeout_s", "turn_deadline_s"),
    ("tool_timeout_s", "deadline_s"),
    ("turn_deadline_s", "deadline_s"),
    ("max_new_tokens", "max_completion_tokens"),
    ("max_tool_result_tokens", "max_completion_tokens"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bound what a trajectory may use. The tightest limit wins; `None` means not set.

    Attributes:
        max_turns: assistant turns; 0 means that the model is never asked. Calls drafted in the last
            turn still run, and their results close the trajectory.
        max_new_tokens: sampled tokens in one turn.
        max_completion_tokens: sampled and observed tokens together, after the prompt.
        max_tool_rounds: rounds of tool calls; calls drafted after that stay unanswered
            (TRL's `max_tool_calling_iterations`).
        max_invalid_calls: calls in a row that could not run (malformed, unknown, bad arguments).
        max_tool_result_tokens: tokens of one tool result; longer ones are cut and marked.
        tool_timeout_s: seconds for one tool call. Not set means 30 s, or less where a deadline is
            tighter; `math.inf` means no limit.
        turn_deadline_s: seconds for one turn: its sampling, and its tools or the user's reply.
            Sampling past it is given up, which ends the trajectory. Calls past it are answered as
            timed out, and the next turn has its own time.
        deadline_s: seconds from the start of the rollout, for each trajectory and so for the whole
            batch: all begin together, and waiting for a place in the engine counts. A turn that is
            being sampled then is given up, and a call is answered as timed out. The trajectory
            keeps its earlier turns and ends as `StopReason.DEADLINE`.

    Raises:
        ValueError: a value is out of range, or can never be reached because a tighter limit always
            comes first (a turn's deadline longer than the rollout's).
    """

    max_turns: int | None = 16
    max_new_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_tool_rounds: int | None = None
    max_invalid_calls: int | None = None
    max_tool_result_tokens: int | None = None
    tool_timeout_s: float | None = None
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
            if value is not None and not value > 0:
                none = "math.inf" if name == "tool_timeout_s" else "None"
                raise ValueError(
                    f"`{name}` must be more than 0, got {value}. Use {none} for no limit."
                )
        self._check_that_each_can_be_reached()

    def _check_that_each_can_be_reached(self) -> None:
        for name, tighter in _NESTED:
            value, bound = getattr(self, name), getattr(self, tighter)
            if value in (None, math.inf) or bound is None or value <= bound:
                continue
            raise ValueError(
                f"`{name}` must be at most `{tighter}`, got {value} and {bound}: it can't be "
                f"reached. Lower `{name}` or raise `{tighter}`."
            )

    @property
    def call_timeout_s(self) -> float | None:
        """Return the seconds for one tool call, the default included; None for no limit."""
        seconds = self.tool_timeout_s
        if seconds is None:
            return _DEFAULT_TOOL_TIMEOUT_S
        return None if seconds == math.inf else seconds
