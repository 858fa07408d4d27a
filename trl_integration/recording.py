"""Write a training run's rollouts to its record.

Owns the fields that only the trainer knows, and matches the learner's logprobs to rows that TRL has
shuffled and split. Invariants: a row's learner logprobs are written once, and are those of the
policy version that sampled it. A record that can't be written never ends the run.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from agent_vllm.record import Redact, RolloutRecorder
from agent_vllm.tools import tool_name
from agent_vllm.types import Trajectory
from trl_integration.training_rollout import TrainingRollout

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RecordedRollout:
    """Hold one rollout of one process once its rewards are known; lists have one entry per row."""

    trajectories: Sequence[Trajectory]
    rows: Sequence[Mapping[str, Any]]  # the dataset's columns
    tools: Sequence[list[str]]  # names
    rewards: Sequence[Mapping[str, float]]
    advantages: Sequence[float]
    trained: Sequence[bool]
    mode: str
    step: int
    rank: int
    num_generations: int
    num_processes: int
    seed: int
    started: float
    temperature: float
    max_model_len: int

    @classmethod
    def of(
        cls,
        rollout: TrainingRollout,
        *,
        reward_names: Sequence[str],
        advantages: Sequence[float],
        rank: int,
        num_generations: int,
        num_processes: int,
        temperature: float,
        max_model_len: int,
    ) -> "RecordedRollout":
        """Return what is recorded of a rollout whose advantages are known."""
        is_training = rollout.mode == "train"
        return cls(
            trajectories=rollout.trajectories,
            rows=[{k: v for k, v in row.items() if k != "prompt"} for row in rollout.rows],
            tools=[[tool_name(tool) for tool in tools] for tools in rollout.tools],
            rewards=[dict(zip(reward_names, row, strict=True)) for row in rollout.rewards.tolist()],
            advantages=advantages,
            trained=[is_training and is_trained for is_trained in rollout.is_trained],
            mode=rollout.mode,
            step=rollout.step,
            rank=rank,
            num_generations=num_generations,
            num_processes=num_processes,
            seed=rollout.seed,
            started=rollout.started,
            temperature=temperature,
            max_model_len=max_model_len,
        )


class TrainingRecord:
    """Record the rollouts of one process.

    Args:
        folder: rank 0 writes `rollouts.jsonl` there, other ranks `rollouts-RANK.jsonl`.

    Attributes:
        num_failed: records and amendments that could not be written. Each kind of failure is logged
            once.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        tokenizer: PreTrainedTokenizerBase,
        redact: Redact | None,
    ) -> None:
        name = "rollouts.jsonl" if rank == 0 else f"rollouts-{rank}.jsonl"
        self._recorder = RolloutRecorder(Path(folder) / name, tokenizer=tokenizer, redact=redact)
        self._num_rollouts: Counter[tuple[str, int]] = Counter()
        self._num_groups: Counter[tuple[str, int]] = Counter()
        # the latest rollout's rows of each mode, by number
        self._unmeasured: dict[str, dict[int, tuple[str, Trajectory]]] = {}
        self._ids: dict[str, dict[int, str]] = {}  # of all its rows
        self._next_row = 0
        self.num_failed = 0
        self._failures: set[type[BaseException]] = set()

    def write(
        self, rollout: RecordedRollout, learner_logprobs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Record a rollout.

        Args:
            learner_logprobs: `[B, C]` if they are known already.

        Returns:
            `[B]` row numbers, which TRL carries to the loss, where `amend` needs them.
        """
        numbers = torch.arange(len(rollout.trajectories)) + self._next_row
        self._next_row += len(numbers)
        known = None if learner_logprobs is None else learner_logprobs.cpu()
        self._unmeasured[rollout.mode], self._ids[rollout.mode] = {}, {}
        key = (rollout.mode, rollout.step)
        for index, trajectory in enumerate(rollout.trajectories):
            learner = None if known is None else _of_sampled(trajectory, known[index])
            record_id = self._attempt(
                self._recorder.write,
                trajectory,
                learner_logprobs=learner,
                **self._fields(rollout, index),
            )
            if record_id is not None:
                self._ids[rollout.mode][int(numbers[index])] = record_id
            if learner is None and record_id is not None:
                self._unmeasured[rollout.mode][int(numbers[index])] = (record_id, trajectory)
        num_rows = len(rollout.trajectories) * rollout.num_processes
        self._num_rollouts[key] += 1
        self._num_groups[key] += -(-num_rows // rollout.num_generations)
        return numbers

    def amend(self, mode: str, numbers: torch.Tensor, learner_logprobs: torch.Tensor) -> None:
        """Add the learner's logprobs `[B, C]` to the rows `[B]` that have none yet."""
        unmeasured = self._unmeasured[mode]
        for number, logprobs in zip(numbers.tolist(), learner_logprobs.cpu(), strict=True):
            if number in unmeasured:
                record_id, trajectory = unmeasured.pop(number)
                learner = _of_sampled(trajectory, logprobs)
                self._attempt(self._recorder.amend, record_id, learner_logprobs=learner)

    def exclude(self, mode: str, numbers: torch.Tensor) -> None:
        """Note that these rows `[B]` were not trained after all."""
        for number in numbers.tolist():
            if (record_id := self._ids[mode].get(number)) is not None:
                self._attempt(self._recorder.amend, record_id, trained=False)

    def close(self) -> None:
        self._recorder.close()
        if self.num_failed:
            _LOGGER.warning(
                "%s: %d lines could not be written.", self._recorder.path, self.num_failed
            )

    def _attempt(self, write: Callable[..., _T], *args: Any, **fields: Any) -> _T | None:
        """Write, or count and log the failure, such as a full disk or a `redact` that raises."""
        try:
            return write(*args, **fields)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # what an object in a row raises when it becomes text, too
            self.num_failed += 1
            if type(error) not in self._failures:
                self._failures.add(type(error))
                _LOGGER.warning("A rollout is not in the record: %r", error)
            return None

    def _fields(self, rollout: RecordedRollout, index: int) -> dict[str, Any]:
        key = (rollout.mode, rollout.step)
        place = rollout.rank * len(rollout.trajectories) + index  # in the batch of all processes
        rewards = rollout.rewards[index].items()
        return {
            "mode": rollout.mode,
            "step": rollout.step,
            "rank": rollout.rank,
            "rollout": self._num_rollouts[key],
            "group": self._num_groups[key] + place // rollout.num_generations,
            "generation": place % rollout.num_generations,
            "seed": rollout.seed,
            "started": rollout.started,
            "temperature": rollout.temperature,
            "max_model_len": rollout.max_model_len,
            "tools": rollout.tools[index],
            # TRL's NaN is a reward function's None: not scored
            "rewards": {name: None if math.isnan(value) else value for name, value in rewards},
            "advantage": rollout.advantages[index],
            "trained": rollout.trained[index],
            "row": rollout.rows[index],
        }


def _of_sampled(trajectory: Trajectory, logprobs: torch.Tensor) -> list[float]:
    """Cut a padded `[C]` to the row's own tokens; 0.0 where not sampled."""
    mask = trajectory.completion_mask
    return [
        value if is_sampled else 0.0
        for value, is_sampled in zip(logprobs[: len(mask)].tolist(), mask, strict=True)
    ]
