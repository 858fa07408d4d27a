"""Predict step time and idle shares of a layout, from a recorded run or from numbers.

With `--from rollouts.jsonl`, the trajectories, the engine's rate and the learner's time come from
the record, and the other options change single values. Without it, `--turns`, `--tokens`,
`--tool-s` and `--rate` are required. A distribution is NUMBER, uniform:LOW:HIGH,
lognormal:MEDIAN:P95 or list:A,B,...
"""

import argparse
import json
import random
import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agent_vllm.errors import ScenarioError
from agent_vllm.inspect.simulate.hardware import LINK_EFFICIENCY, LINKS
from agent_vllm.inspect.simulate.rates import RateCurve
from agent_vllm.inspect.simulate.recorded import RecordedRun, read_run
from agent_vllm.inspect.simulate.step import LAYOUTS, Setup, predict
from agent_vllm.inspect.simulate.sync import sync_seconds, sync_table
from agent_vllm.inspect.simulate.workload import Plan, Workload, distribution, with_tools

_TRUSTED = 0.15  # of the recorded time
_OPTIONS: dict[str, dict[str, Any]] = {
    "layout": {"help": f"one of {', '.join(LAYOUTS)}; default: shared"},
    "engines": {"nargs": "+", "type": int, "help": "numbers of engines, one line each; default: 1"},
    "trajectories": {"type": int, "help": "trajectories per step; default: 64, or as recorded"},
    "turns": {"help": "turns per trajectory, a distribution"},
    "tokens": {"help": "sampled tokens per turn, a distribution"},
    "tool_s": {"help": "seconds between two turns, a distribution"},
    "tool_scale": {"type": float, "help": "scale the recorded times between turns"},
    "rate": {
        "nargs": "+",
        "metavar": "SEQUENCES:TOKENS_PER_S",
        "help": "measured points of one engine: total tokens per second at a number of sequences",
    },
    "max_num_seqs": {
        "type": int,
        "help": "sequences that run in one engine at a time; default: 128",
    },
    "learner_s": {"type": float, "help": "seconds per step for rewards, loss and optimizer"},
    "sync_s": {
        "type": float,
        "help": "seconds per weight sync; default: 0 (a record has it in --learner-s)",
    },
    "sync_bytes": {
        "type": float,
        "help": "bytes per weight sync, sent over --link; replaces --sync-s",
    },
    "link": {
        "help": f"one of {', '.join(LINKS)}; {LINK_EFFICIENCY:.0%}% of the nominal rate is used"
    },
    "steps": {"type": int, "help": "steps to simulate; default: 10, or all recorded"},
    "seed": {"type": int, "help": "seed of the random draws; default: 0"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="record", type=Path, help="rollouts.jsonl of a run")
    parser.add_argument("--scenario", type=Path, help="JSON file with the options below")
    for name, about in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--sync-table", action="store_true", help="print expected sync times by model size and exit"
    )


def run(args: argparse.Namespace) -> int:
    if args.sync_table:
        print("\n".join("| " + " | ".join(row) + " |" for row in sync_table()))
        return 0
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    options = (_scenario(args.scenario) if args.scenario else {}) | given
    recorded = read_run(args.record) if args.record else None
    result = simulate(options, recorded)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _show(result)
    return 0


def simulate(options: Mapping[str, Any], recorded: RecordedRun | None = None) -> dict[str, Any]:
    """Return what the command prints as JSON: the options in effect and the predictions.

    Args:
        options: the command's options, named with underscores.

    Raises:
        ScenarioError: an option is missing, unknown or invalid.
    """
    rollouts = _rollouts(options, recorded)
    setup = _setup(options, recorded, len(rollouts[0]))
    found = [
        predict(rollouts, replace(setup, num_engines=number))
        for number in options.get("engines", [1])
    ]
    return {
        "layout": setup.layout,
        "trajectories": len(rollouts[0]),
        "steps": len(rollouts),
        "rate": [list(point) for point in setup.rate.points],
        "max_num_seqs": setup.max_num_seqs,
        "recorded": recorded and _as_recorded(recorded, options),
        "predicted": [asdict(prediction) for prediction in found],
    }


# ---- options ----


def _scenario(path: Path) -> dict[str, Any]:
    try:
        options = json.loads(path.read_text())
    except ValueError as error:
        raise ScenarioError(f"{path} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ScenarioError(f"{path} must hold a JSON object, got {str(options)[:80]}.")
    unknown = sorted(options.keys() - _OPTIONS.keys())
    if unknown:
        raise ScenarioError(f"{path} has unknown options {unknown}. Known: {list(_OPTIONS)}.")
    for name, value in options.items():
        options[name] = _checked(name, value, path)
    return options


def _checked(name: str, value: Any, path: Path) -> Any:
    """Convert a value of a scenario file as the command line would."""
    kind = _OPTIONS[name].get("type", str)
    many = "nargs" in _OPTIONS[name]
    try:
        return [kind(item) for item in _listed(value)] if many else kind(value)
    except (TypeError, ValueError):
        raise ScenarioError(f"{path}: `{name}` must be {kind.__name__}, got {value!r}.") from None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _needed(options: Mapping[str, Any], *names: str) -> list[Any]:
    missing = [f"--{name.replace('_', '-')}" for name in names if name not in options]
    if missing:
        raise ScenarioError(f"{', '.join(missing)} must be given, or --from a recorded run.")
    return [options[name] for name in names]


def _rollouts(options: Mapping[str, Any], recorded: RecordedRun | None) -> list[list[Plan]]:
    stream = random.Random(options.get("seed", 0))
    for name in {"trajectories", "steps"} & options.keys():
        if options[name] < 1:
            raise ScenarioError(f"`{name}` must be 1 or more, got {options[name]}.")
    if recorded is not None:
        return _recorded_rollouts(options, recorded, stream)
    if "tool_scale" in options:
        raise ScenarioError("`tool_scale` is for recorded runs: give --from.")
    turns, tokens, tool_s = map(distribution, _needed(options, "turns", "tokens", "tool_s"))
    workload = Workload(turns=turns, tokens=tokens, tool_s=tool_s)
    number = options.get("trajectories", 64)
    return [workload.draw(number, stream) for _ in range(options.get("steps", 10))]


def _recorded_rollouts(
    options: Mapping[str, Any], recorded: RecordedRun, stream: random.Random
) -> list[list[Plan]]:
    """Return the recorded rollouts, or resample them to another number of trajectories."""
    for name in ("turns", "tokens"):
        if name in options:
            raise ScenarioError(f"`{name}` comes from the record: leave it or --from out.")
    rollouts = recorded.rollouts
    if "trajectories" in options:
        pool = [plan for plans in rollouts for plan in plans]
        rollouts = [stream.choices(pool, k=options["trajectories"]) for _ in rollouts]
    rollouts = rollouts[: options.get("steps")]
    if "tool_s" in options:
        other = distribution(options["tool_s"])
        rollouts = [with_tools(plans, lambda _: other.draw(stream)) for plans in rollouts]
    scale = options.get("tool_scale", 1.0)
    if not 0 <= scale < float("inf"):
        raise ScenarioError(f"`tool_scale` must be 0 or more, got {scale}.")
    return [with_tools(plans, lambda seconds: scale * seconds) for plans in rollouts]


def _setup(options: Mapping[str, Any], recorded: RecordedRun | None, number: int) -> Setup:
    return Setup(
        layout=options.get("layout", "shared"),
        rate=_rate(options, recorded),
        max_num_seqs=options.get("max_num_seqs", 128),
        learner_s=options.get("learner_s", _recorded_learner_s(recorded, number)),
        sync_s=_sync_s(options),
    )


def _rate(options: Mapping[str, Any], recorded: RecordedRun | None) -> RateCurve:
    if recorded is not None and "rate" not in options:
        return recorded.rate()
    try:
        points = [tuple(map(float, point.split(":"))) for point in _needed(options, "rate")[0]]
        return RateCurve(tuple((number, rate) for number, rate in points))
    except ScenarioError:
        raise
    except ValueError:
        raise ScenarioError(
            f"`rate` must be SEQUENCES:TOKENS_PER_S, got {options['rate']}."
        ) from None


def _recorded_learner_s(recorded: RecordedRun | None, number: int) -> float:
    """Return the recorded time between rollouts, scaled to `number` trajectories."""
    learner_s = recorded and recorded.learner_s()
    if recorded is None or learner_s is None:
        return 0.0
    return learner_s * number / statistics.mean(map(len, recorded.rollouts))


def _sync_s(options: Mapping[str, Any]) -> float:
    if "sync_bytes" not in options:
        if "link" in options:
            raise ScenarioError("`link` needs --sync-bytes.")
        return options.get("sync_s", 0.0)
    if "sync_s" in options:
        raise ScenarioError("`sync_s` and `sync_bytes` exclude each other: give one.")
    return sync_seconds(options["sync_bytes"], _needed(options, "link")[0])


def _as_recorded(recorded: RecordedRun, options: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the measured times beside a simulation of the same rollouts.

    With a given rate, which may be another machine's, there is nothing to compare.
    """
    predicted_s = None
    if "rate" not in options:
        setup = Setup(
            layout="shared", rate=recorded.rate(), max_num_seqs=options.get("max_num_seqs", 128)
        )
        predicted_s = predict(recorded.rollouts, setup).rollout_s
    return {
        "rollout_s": statistics.mean(recorded.rollout_s),
        "predicted_rollout_s": predicted_s,
        "learner_s": recorded.learner_s(),
    }


# ---- the table ----


def _show(result: Mapping[str, Any]) -> None:
    console = Console()
    console.print(_table(result))
    bound = result["predicted"][-1]
    console.print(
        f"With {bound['num_engines']} engines a rollout takes {bound['engine_bound_s']:.3g} s if "
        f"tools take no time, and {bound['tool_bound_s']:.3g} s if tokens take none. A busy engine "
        f"runs {bound['mean_running']:.3g} sequences; {bound['mean_queued']:.3g} are queued."
    )
    if recorded := result["recorded"]:
        console.print(_trust(recorded["rollout_s"], recorded["predicted_rollout_s"]))


def _trust(recorded_s: float, predicted_s: float | None) -> str:
    text = f"Recorded: {recorded_s:.3g} s per rollout"
    if predicted_s is None:
        return f"{text}."
    text += f"; simulated: {predicted_s:.3g} s."
    if abs(predicted_s - recorded_s) <= _TRUSTED * recorded_s:
        return text
    return (
        f"{text} They are more than {_TRUSTED:.0%} apart: don't trust the rest. An engine that "
        "batches whole turns (torch), warms up or shares its machine is not simulated. Give --rate."
    )


def _table(result: Mapping[str, Any]) -> Table:
    title = f"{result['layout']}, {result['trajectories']} trajectories per step, times in seconds"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    devices = list(result["predicted"][0]["shares"])
    for head in (
        "engines", "rollout", "learner", "sync", "step", "tokens/s",
        *(f"{device} idle" for device in devices),
    ):  # fmt: skip
        table.add_column(head, justify="right")
    for prediction in result["predicted"]:
        table.add_row(
            str(prediction["num_engines"]),
            *(f"{prediction[key]:.3g}" for key in ("rollout_s", "learner_s", "sync_s", "step_s")),
            f"{prediction['tokens_per_s']:.4g}",
            *(f"{prediction['shares'][device]['idle']:.0%}" for device in devices),
        )
    return table
