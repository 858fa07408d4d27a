"""Checks of a run that goes on and learns nothing, or something wrong.

Owns what counts as a sign of that, and the text that says so. Invariant: each cause is reported once
per run, with its figures, the first error where there is one, and a remedy.

Legend: B rows of a rollout, F reward functions.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from accelerate import Accelerator
from accelerate.utils import gather_object

from agent_vllm.errors import RunCheckError
from agent_vllm.tools import tool_name
from agent_vllm.types import StopReason
from trl_integration.fields import Exclusion
from trl_integration.logprob_gap import Gap, GapMeter
from trl_integration.training_rollout import TrainingRollout

OnWarning = Literal["warn", "stop"]

_MANY = 0.9  # share of calls, tokens or trajectories that counts as nearly all
_FAILING_TOOL, _MIN_CALLS = 3, 8  # at most so many rollouts, at least so many calls
# rollouts in a row in which something must be so
_NO_TOKENS, _NO_REWARDS, _ONE_LIMIT, _EQUAL_REWARDS, _UNUSED = 3, 3, 5, 10, 20

_LIMITS = {  # and the setting that raises each
    StopReason.MAX_TURNS: "Raise `max_turns` or `max_tool_calling_iterations`",
    StopReason.TURN_LENGTH: "Raise `max_new_tokens`",
    StopReason.COMPLETION_BUDGET: "Raise `max_completion_length`",
    StopReason.CONTEXT_FULL: "Raise the engine's `max_model_len`, or shorten prompts",
    StopReason.DEADLINE: "Raise `deadline_s` or `turn_deadline_s`",
    StopReason.INVALID_CALLS: "Raise `max_invalid_calls`, or look at what the model writes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWarning:
    """One cause, reported once per run."""

    cause: str  # its key, such as "tool_fails/search"
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFacts:
    """Hold what the checks need of one rollout; those of several processes can be joined."""

    offered: Counter[str]  # trajectories per tool
    calls: Counter[str]  # drafted calls per tool that was offered
    failed_calls: Counter[str]  # those without a result of the tool
    first_errors: Mapping[str, str]  # by tool
    stop_reasons: Counter[StopReason]  # of trajectories
    num_sampled: int  # tokens
    excluded: Counter[Exclusion]  # sampled tokens
    first_failure: str | None  # of a trajectory
    rewards: list[list[float]]  # [B][F], NaN where a function returned None or was not asked
    is_scored: list[bool]  # [B] False for failed trajectories

    @classmethod
    def of(cls, rollout: TrainingRollout) -> "RolloutFacts":
        """Return the facts of a rollout on this process."""
        offered, calls, failed = Counter[str](), Counter[str](), Counter[str]()
        excluded, errors = Counter[Exclusion](), dict[str, str]()
        for trajectory, tools, reason in zip(
            rollout.trajectories, rollout.tools, rollout.exclusions, strict=True
        ):
            names = {tool_name(tool) for tool in tools}
            offered.update(names)
            for result in trajectory.tool_results:
                if result.name in names:
                    calls[result.name] += 1
                    if result.status != "ok":
                        failed[result.name] += 1
                        errors.setdefault(result.name, result.content)
            if reason is not None:
                excluded[reason] += trajectory.num_sampled_tokens
        failures = (t.error for t in rollout.trajectories if t.stop_reason.is_failure)
        return cls(
            offered=offered,
            calls=calls,
            failed_calls=failed,
            first_errors=errors,
            stop_reasons=Counter(t.stop_reason for t in rollout.trajectories),
            num_sampled=sum(t.num_sampled_tokens for t in rollout.trajectories),
            excluded=excluded,
            first_failure=next(failures, None),
            rewards=rollout.rewards.tolist(),
            is_scored=[not is_failed for is_failed in rollout.is_failed],
        )

    @classmethod
    def join(cls, parts: Sequence["RolloutFacts"]) -> "RolloutFacts":
        """Return the facts of several processes or rollouts as one."""
        return cls(
            offered=sum((part.offered for part in parts), Counter()),
            calls=sum((part.calls for part in parts), Counter()),
            failed_calls=sum((part.failed_calls for part in parts), Counter()),
            first_errors={k: v for part in reversed(parts) for k, v in part.first_errors.items()},
            stop_reasons=sum((part.stop_reasons for part in parts), Counter()),
            num_sampled=sum(part.num_sampled for part in parts),
            excluded=sum((part.excluded for part in parts), Counter()),
            first_failure=next((p.first_failure for p in parts if p.first_failure), None),
            rewards=[row for part in parts for row in part.rewards],
            is_scored=[row for part in parts for row in part.is_scored],
        )


# ---- the checks: pure functions of the latest rollouts ----


def failing_tools(rollouts: RolloutFacts) -> Iterator[RunWarning]:
    """Warn of tools of which nearly all calls fail."""
    for name, num_calls in rollouts.calls.items():
        num_failed = rollouts.failed_calls[name]
        if num_calls >= _MIN_CALLS and num_failed >= _MANY * num_calls:
            yield RunWarning(
                cause=f"tool_fails/{name}",
                message=f"{num_failed} of {num_calls} calls of the tool {name!r} failed, the first "
                f"with: {rollouts.first_errors[name]!r}. The policy is trained on error messages. Call "
                "the tool by hand with these arguments.",
            )


def unused_tools(rollouts: RolloutFacts) -> Iterator[RunWarning]:
    """Warn of tools that no trajectory called."""
    unused = sorted(name for name in rollouts.offered if not rollouts.calls[name])
    if unused:
        yield RunWarning(
            cause="tools_unused",
            message=f"The tools {unused} were offered in the last {_UNUSED} rollouts and never "
            "called. Ask for them in the prompt, or leave them out.",
        )


def untrained_tokens(rollouts: RolloutFacts) -> Iterator[RunWarning]:
    """Warn if nearly no sampled token is trained."""
    num_excluded = sum(rollouts.excluded.values())
    if rollouts.num_sampled > num_excluded and num_excluded < _MANY * rollouts.num_sampled:
        return
    shares = {str(reason): count for reason, count in rollouts.excluded.most_common()}
    first = rollouts.first_failure
    yield RunWarning(
        cause="no_trained_tokens",
        message=f"{rollouts.num_sampled - num_excluded} of {rollouts.num_sampled} sampled tokens of "
        f"the last {_NO_TOKENS} rollouts are trained; the others are excluded: {shares}."
        + (f" The first failure is: {first}." if first else "")
        + ' The table "Of the rollout" in docs/metrics.md says what each name means.',
    )


def one_limit(rollouts: RolloutFacts) -> Iterator[RunWarning]:
    """Warn if nearly all trajectories end at the same limit."""
    (reason, count), *_ = rollouts.stop_reasons.most_common(1)
    num_trajectories = rollouts.stop_reasons.total()
    if reason in _LIMITS and count >= _MANY * num_trajectories:
        yield RunWarning(
            cause=f"limit/{reason}",
            message=f"{count} of {num_trajectories} trajectories of the last {_ONE_LIMIT} rollouts "
            f"ended as {str(reason)!r}. {_LIMITS[reason]}.",
        )


def equal_rewards(
    rollouts: RolloutFacts, names: Sequence[str], num_generations: int
) -> Iterator[RunWarning]:
    """Warn if no group of samples had different rewards: nothing is learned from equal ones."""
    rows = rollouts.rewards
    groups = [rows[i : i + num_generations] for i in range(0, len(rows), num_generations)]
    columns = [column for group in groups for column in zip(*group, strict=True)]
    values = [{value for value in column if value == value} for column in columns]  # without NaN
    if any(values) and all(len(different) <= 1 for different in values):
        first = dict(zip(names, rollouts.rewards[0], strict=True))
        yield RunWarning(
            cause="equal_rewards",
            message=f"In the last {_EQUAL_REWARDS} rollouts all samples of a prompt got equal "
            f"rewards, the first {first}: every advantage is 0 and nothing is learned. Check the "
            "reward functions on `trainer.trajectories`, or use easier or harder prompts.",
        )


def unscoring_functions(rollouts: RolloutFacts, names: Sequence[str]) -> Iterator[RunWarning]:
    """Warn of reward functions that returned only None."""
    scored = [row for row, is_in in zip(rollouts.rewards, rollouts.is_scored, strict=True) if is_in]
    for index, name in enumerate(names):
        if scored and all(row[index] != row[index] for row in scored):
            yield RunWarning(
                cause=f"no_reward/{name}",
                message=f"The reward function {name!r} returned only None in the last "
                f"{_NO_REWARDS} rollouts ({len(scored)} trajectories). Return a number for the rows "
                "that it is for, or leave it out.",
            )


def gap_warning(gap: Gap, meter: GapMeter, policy_version: int) -> RunWarning:
    """Return the warning of a gap beyond the bound."""
    return RunWarning(
        cause="logprob_gap",
        message=f"The engine's logprobs are {gap.mean:.3g} nats from the learner's on average and "
        f"{gap.max:.3g} at worst, over {gap.num_tokens} tokens at policy version {policy_version}; "
        f"rounding explains at most {meter.max_mean:g} and {meter.max_worst:g}. What is left of this "
        "rollout is not trained, nor are later ones like it (`rollout/mismatched_tokens`). The "
        "engine does not sample with the learner's weights: look at its `_load_weights`, at who "
        "else pushes weights to its servers, and for steps that failed. Set `max_logprob_gap` if a "
        "quantised engine is this far away.",
    )


# ---- in a run ----


class RunChecks:
    """
    Check the training rollouts of a run.

    Args:
        on_warning: "warn" prints, "stop" raises, on all processes.
        reward_names: [F].
        num_generations: samples per prompt.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        on_warning: OnWarning,
        reward_names: Sequence[str],
        num_generations: int,
    ) -> None:
        self._accelerator = accelerator
        self._on_warning = on_warning
        self._reward_names = list(reward_names)
        self._num_generations = num_generations
        self._rollouts: deque[RolloutFacts] = deque(maxlen=_UNUSED)
        self._reported: set[str] = set()

    def see(self, rollout: TrainingRollout) -> None:
        """Check the latest rollout of all processes, and those before it."""
        ranks: list[RolloutFacts] = gather_object([RolloutFacts.of(rollout)])
        self._rollouts.append(RolloutFacts.join(ranks))
        for warning in self._warnings():
            self.report(warning)

    def _warnings(self) -> Iterator[RunWarning]:
        yield from failing_tools(RolloutFacts.join(list(self._rollouts)[-_FAILING_TOOL:]))
        for rollouts in self._last(_NO_TOKENS):
            yield from untrained_tokens(rollouts)
        for rollouts in self._last(_NO_REWARDS):
            yield from unscoring_functions(rollouts, self._reward_names)
        for rollouts in self._last(_ONE_LIMIT):
            yield from one_limit(rollouts)
        for rollouts in self._last(_EQUAL_REWARDS):
            yield from equal_rewards(rollouts, self._reward_names, self._num_generations)
        for rollouts in self._last(_UNUSED):
            yield from unused_tools(rollouts)

    def _last(self, num_rollouts: int) -> Iterator[RolloutFacts]:
        """Yield the last rollouts as one, once there are so many."""
        if len(self._rollouts) >= num_rollouts:
            latest = list(self._rollouts)[-num_rollouts:]
            yield RolloutFacts.join(latest)

    def report(self, warning: RunWarning) -> None:
        """
        Report a cause, if it has not been.

        Raises:
            RunCheckError: with `on_warning="stop"`.
        """
        if warning.cause in self._reported:
            return
        self._reported.add(warning.cause)
        if self._on_warning == "stop":
            raise RunCheckError(f'{warning.message} (The run stops because of on_warning="stop".)')
        self._accelerator.print(f"Warning: {warning.message}")
