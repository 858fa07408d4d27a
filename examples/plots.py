"""Plot a run, from its log history and its recorded rollouts.

    python examples/plots.py runs/tiny-agent

Reads the last checkpoint's `trainer_state.json` and `rollouts.jsonl`.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from agent_vllm.record import RolloutRecord, batch_name, read_batches

Log = Mapping[str, float]
STOP_REASON = "rollout/stop_reason/"
GAP = "sampling/logprob_gap/"
COLOURS = {"model": "#4c78a8", "tool": "#f58518"}


def plot_run(history: Iterable[Log], folder: Path, title: str) -> list[Path]:
    """Plot what the run has data for; return the files written."""
    history = list(history)
    drawn = {
        "reward.png": plot_reward(history, folder / "reward.png", title),
        "stop_reasons.png": plot_stop_reasons(history, folder / "stop_reasons.png"),
        "gap.png": plot_gap(history, folder / "gap.png"),
    }
    record = folder / "rollouts.jsonl"
    if record.exists():
        drawn["gantt.png"] = plot_gantt(_last_training_batch(record), folder / "gantt.png")
    return [folder / name for name, is_drawn in drawn.items() if is_drawn]


def plot_reward(history: Sequence[Log], path: Path, title: str) -> bool:
    logs = [log for log in history if "reward" in log]
    steps, mean, std = ([log[key] for log in logs] for key in ("step", "reward", "reward_std"))
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))

    def draw(axes: Axes) -> None:
        axes.fill_between(steps, low, high, alpha=0.2, label="one standard deviation")
        axes.plot(steps, mean, label="mean reward")
        axes.set(xlabel="optimizer step", ylabel="reward of sampled trajectories", title=title)
        axes.legend(loc="lower right")

    return _save(draw, path, bool(logs))


def plot_stop_reasons(history: Sequence[Log], path: Path) -> bool:
    """Plot the shares of stop reasons, stacked; reasons that never occurred are left out."""
    logs = [log for log in history if f"{STOP_REASON}answered" in log]
    names = sorted({key for log in logs for key in log if key.startswith(STOP_REASON) and log[key]})
    shares = [[log.get(name, 0.0) for log in logs] for name in names]

    def draw(axes: Axes) -> None:
        labels = [name.removeprefix(STOP_REASON) for name in names]
        axes.stackplot([log["step"] for log in logs], shares, labels=labels)
        axes.set(xlabel="optimizer step", ylabel="share of trajectories", ylim=(0, 1))
        axes.legend(loc="lower right")

    return _save(draw, path, bool(logs))


def plot_gap(history: Sequence[Log], path: Path) -> bool:
    """Plot the gap between the engine's and the learner's logprobs."""
    logs = [log for log in history if f"{GAP}mean" in log]

    def draw(axes: Axes) -> None:
        for name in ("max", "mean"):
            axes.plot([log["step"] for log in logs], [log[GAP + name] for log in logs], label=name)
        axes.set(xlabel="optimizer step", ylabel="engine against learner, nats", yscale="log")
        axes.legend()

    return _save(draw, path, bool(logs))


def plot_gantt(batch: Sequence[RolloutRecord], path: Path, max_rows: int = 64) -> bool:
    """Plot when each trajectory of a rollout waited for model and tools, one row each."""

    def draw(axes: Axes) -> None:
        for row, record in enumerate(batch[:max_rows]):
            for kind, colour in COLOURS.items():
                bars = [
                    (span.start_s, span.end_s - span.start_s)
                    for span in record["spans"]
                    if span.kind == kind
                ]
                axes.broken_barh(
                    bars, (row - 0.4, 0.8), color=colour, label=kind if not row else ""
                )
        axes.set(xlabel="seconds", ylabel="trajectory", title=batch_name(batch[0]))
        axes.invert_yaxis()
        axes.legend(loc="lower right")

    return _save(draw, path, bool(batch))


def _last_training_batch(record: Path) -> list[RolloutRecord]:
    last: list[RolloutRecord] = []
    for batch in read_batches(record):
        if batch[0]["mode"] == "train":
            last = batch
    return last


def _save(draw: Any, path: Path, is_wanted: bool) -> bool:
    if is_wanted:
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        draw(axes)
        figure.savefig(path, dpi=120)
        plt.close(figure)
    return is_wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a run's output folder")
    folder = parser.parse_args().folder
    states = sorted(
        folder.glob("checkpoint-*/trainer_state.json"), key=lambda p: int(p.parent.name[11:])
    )
    if not states:
        raise SystemExit(f"{folder} has no checkpoint with a `trainer_state.json`.")
    history = json.loads(states[-1].read_text())["log_history"]
    for path in plot_run(history, folder, folder.name):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
