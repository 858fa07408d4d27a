"""Compute what is left of a trajectory's limits: tokens, time, and which limit ends it.

Pure: every function gets what was used and returns what is left. Knows no engine and no clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from agent_vllm.settings import Limits
from agent_vllm.types import StopReason, ToolResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """Count what a trajectory has used so far."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0  # sampled and observed
    num_turns: int = 0
    num_tool_rounds: int = 0
    num_invalid_in_a_row: int = 0
    elapsed_s: float = 0.0  # since the rollout began
    turn_started_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_completion_tokens

    def plus_turn(self, num_tokens: int) -> "Used":
        """Count a sampled turn."""
        return replace(self.plus_suffix(num_tokens), num_turns=self.num_turns + 1)

    def plus_suffix(self, num_tokens: int) -> "Used":
        """Count tokens that were written after a turn."""
        return replace(self, num_completion_tokens=self.num_completion_tokens + num_tokens)

    def plus_tool_round(self, results: Iterable[ToolResult]) -> "Used":
        """Count a round of calls, and how many calls in a row were invalid at its end."""
        in_a_row = self.num_invalid_in_a_row
        for result in results:
            in_a_row = in_a_row + 1 if result.status == "invalid" else 0
        return replace(
            self, num_tool_rounds=self.num_tool_rounds + 1, num_invalid_in_a_row=in_a_row
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Say what is left of a trajectory's limits.

    >>> limits = Limits(max_new_tokens=8, max_completion_tokens=20)
    >>> used = Used(num_prompt_tokens=5, num_completion_tokens=14)
    >>> budget = Budget(limits=limits, max_model_len=100, used=used)
    >>> budget.completion_left, budget.context_left, budget.turn_tokens
    (6, 81, 6)
    """

    limits: Limits
    max_model_len: int
    used: Used

    # ---- tokens ----

    @property
    def context_left(self) -> int:
        return self.max_model_len - self.used.num_tokens

    @property
    def completion_left(self) -> int:
        """Return what is left of `max_completion_tokens`; of the context if it is not set."""
        limit = self.limits.max_completion_tokens
        return self.context_left if limit is None else limit - self.used.num_completion_tokens

    @property
    def room(self) -> int:
        """Return the tokens that can still be sampled or observed."""
        return min(self.completion_left, self.context_left)

    @property
    def turn_tokens(self) -> int:
        """Return the tokens that the next turn may sample."""
        limit = self.limits.max_new_tokens
        return self.room if limit is None else min(limit, self.room)

    # ---- time ----

    @property
    def time_left_s(self) -> float | None:
        """Return the seconds until the trajectory's deadline; None without one."""
        deadline_s = self.limits.deadline_s
        return None if deadline_s is None else max(deadline_s - self.used.elapsed_s, 0.0)

    @property
    def turn_time_left_s(self) -> float | None:
        """Return the seconds until the first deadline, this turn's or the trajectory's."""
        limit_s, time_left_s = self.limits.turn_deadline_s, self.time_left_s
        if limit_s is None:
            return time_left_s
        turn_left_s = max(self.used.turn_started_s + limit_s - self.used.elapsed_s, 0.0)
        return turn_left_s if time_left_s is None else min(turn_left_s, time_left_s)

    # ---- endings ----

    def stop_before_turn(self) -> StopReason | None:
        """Return what forbids another turn, or None."""
        if self._had_last_turn:
            return StopReason.MAX_TURNS
        if self.time_left_s == 0.0:
            return StopReason.DEADLINE
        return self._what_is_full()

    def stop_before_calls(self) -> StopReason | None:
        """Return what forbids that the turn's calls run, or None."""
        if self.used.num_tool_rounds == self.limits.max_tool_rounds:
            return StopReason.MAX_TURNS
        return StopReason.DEADLINE if self.time_left_s == 0.0 else None

    def stop_after_calls(self) -> StopReason | None:
        """Return what makes the turn's results the last thing in the trajectory, or None."""
        limit = self.limits.max_invalid_calls
        if limit is not None and self.used.num_invalid_in_a_row >= limit:
            return StopReason.INVALID_CALLS
        return StopReason.MAX_TURNS if self._had_last_turn else None

    def what_cut(self, num_tokens: int) -> StopReason:
        """Return the limit that cut a turn of `num_tokens`, the most that it was allowed."""
        if num_tokens == self.limits.max_new_tokens:
            return StopReason.TURN_LENGTH
        return self._what_is_full() or StopReason.TURN_LENGTH

    @property
    def tightest(self) -> StopReason:
        """Return the token limit that is reached first."""
        if self.completion_left < self.context_left:
            return StopReason.COMPLETION_BUDGET
        return StopReason.CONTEXT_FULL

    @property
    def _had_last_turn(self) -> bool:
        limit = self.limits.max_turns
        return limit is not None and self.used.num_turns >= limit

    def _what_is_full(self) -> StopReason | None:
        if self.context_left <= 0:
            return StopReason.CONTEXT_FULL
        return StopReason.COMPLETION_BUDGET if self.completion_left <= 0 else None
