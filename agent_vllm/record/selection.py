"""Choose recorded trajectories by an expression over their figures.

Owns the names that an expression may use. Invariant: an expression that can't be read, or that
matches nothing, is an error; a figure that a trajectory lacks fails every comparison.
"""

from collections.abc import Container
from pathlib import Path
from typing import Any

from agent_vllm.errors import EmptyRecordError, RecordError
from agent_vllm.record.reader import read_rollouts
from agent_vllm.record.schema import RolloutRecord

FIGURES = (
    "reward, each reward function by its name, advantage, trained, stop_reason, mode, step, rank, "
    "group, generation, thinking, turns, calls, failed_calls, sampled_tokens, prompt_tokens"
)


def figures(record: RolloutRecord) -> dict[str, Any]:
    """Return what an expression may name; `reward` is the sum of the reward functions' values."""
    rewards = {name: value for name, value in record.rewards.items() if value is not None}
    results = record.trajectory.tool_results
    return {
        **record.rewards,
        "reward": sum(rewards.values()) if rewards else None,
        "advantage": record.advantage,
        "trained": record.trained,
        "stop_reason": str(record.stop_reason),
        "mode": record.mode,
        "step": record.step,
        "rank": record.rank,
        "group": record.group,
        "generation": record.generation,
        "thinking": record.thinking,
        "turns": len(record.turns),
        "calls": len(results),
        "failed_calls": sum(result.status != "ok" for result in results),
        "sampled_tokens": record.trajectory.num_sampled_tokens,
        "prompt_tokens": len(record.prompt_ids),
    }


def matching_ids(source: str | Path, where: str) -> Container[str]:
    """Return the ids of the records for which `where` is true.

    Args:
        where: an expression of `pandas.DataFrame.eval`, such as `reward >= 1 and turns > 2`.

    Raises:
        RecordError: `where` can't be read, or is not true or false.
        EmptyRecordError: it matches no trajectory.
    """
    import pandas as pd

    records = {record.id: figures(record) for record in read_rollouts(source)}
    table = pd.DataFrame.from_dict(records, orient="index")
    try:
        is_chosen = table.eval(where, engine="python")
    except Exception as error:  # pandas has no common one
        raise RecordError(f"{_wanted(where)}: {error}. It may name {FIGURES}.") from error
    if not isinstance(is_chosen, pd.Series) or is_chosen.dtype != bool:
        raise RecordError(f"{_wanted(where)}, which is not true or false. It may name {FIGURES}.")
    chosen = table.loc[is_chosen].index
    if chosen.empty:
        best = table["reward"].max()
        raise EmptyRecordError(
            f"`--where` must match a trajectory, got {where!r}, which matches none of the "
            f"{len(table)} in {source}; their highest reward is {best}."
        )
    return set(chosen)


def _wanted(where: str) -> str:
    return f"`--where` must be an expression such as `reward >= 1 and turns > 2`, got {where!r}"
