"""Run all rows; print a table, write `benchmarks/results/latest.json` and a chart.

python -m benchmarks --only B1 --only B9
python -m benchmarks --quick        # small sizes, to check that everything runs
python -m benchmarks --table        # the latest results in Markdown, for the docs
"""

import os

# As in the Makefile: threads that spin while they wait slow each other down tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "examples"))  # the models

from benchmarks.rows import ROWS
from benchmarks.runner import markdown_table, measure, print_table, run_rows, write_results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(ROWS), metavar="ID")
    parser.add_argument("--quick", action="store_true", help="small sizes; the figures say nothing")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--table", action="store_true", help="print the latest results, run nothing"
    )
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # one row, in this process
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], Path(arguments.measure[1]), arguments.quick)
        return 0
    if arguments.table:
        rows = json.loads((arguments.output_dir / "latest.json").read_text())
        print(markdown_table(rows))
        return 0
    figures = run_rows(arguments.only or list(ROWS), arguments.quick)
    print_table(figures)
    write_results(figures, arguments.output_dir, arguments.quick)
    return 1 if any("error" in figure for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
