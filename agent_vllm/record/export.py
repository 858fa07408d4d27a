"""Write recorded rollouts as Parquet through `datasets`, and read them back.

A row is a trajectory. Fields of numbers, texts and flat lists are columns; the others are JSON
text. `completion_ids`, `completion_mask` and `logprobs` are added for whoever reads the table.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_vllm.record.parquet import features, to_row
from agent_vllm.record.reader import read_rollouts

DESCRIPTION = (
    "Write recorded rollouts as a Parquet file for pandas, polars or DuckDB: one row per "
    "trajectory. Every other command reads it like the original."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl, or the folder of the run")
    parser.add_argument("output", type=Path, help="the .parquet file to write")


def run(args: argparse.Namespace) -> int:
    if args.output.suffix != ".parquet":
        raise SystemExit(f"`output` must end in .parquet, got {args.output}.")
    print(f"wrote {write_parquet(args.rollouts, args.output)} trajectories to {args.output}")
    return 0


def write_parquet(source: str | Path, path: str | Path) -> int:
    """Convert a record and return the number of trajectories. The file appears once it is whole.

    Raises:
        RecordError: as `read_rollouts`.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        try:
            rows = Dataset.from_generator(
                _rows, features=features(), cache_dir=folder, gen_kwargs={"source": str(source)}
            )
        except DatasetGenerationError as error:  # around what `read_rollouts` raised
            raise error.__cause__ or error from None
        whole = Path(folder) / path.name
        rows.to_parquet(whole)
        os.replace(whole, path)
        return len(rows)


def _rows(source: str) -> Iterator[dict[str, Any]]:
    yield from map(to_row, read_rollouts(source))
