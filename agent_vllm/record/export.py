"""Write recorded rollouts as Parquet through `datasets`, and read them back.

A row is a trajectory. Fields of numbers, texts and flat lists are columns; the others are JSON
text. `completion_ids`, `completion_mask` and `logprobs` are added for whoever reads the table.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_vllm.errors import EmptyRecordError
from agent_vllm.record.reader import read_rollouts
from agent_vllm.record.schema import RolloutRecord, check_record, to_json

DESCRIPTION = (
    "Write recorded rollouts as a Parquet file for pandas, polars or DuckDB: one row per "
    "trajectory. Every other command reads it like the original."
)
_JSON_FIELDS = ("messages", "rewards", "row", "token_texts", "turns")
_ADDED = ("completion_ids", "completion_mask", "logprobs")


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
                _rows, features=_features(), cache_dir=folder, gen_kwargs={"source": str(source)}
            )
        except DatasetGenerationError as error:  # around what `read_rollouts` raised
            raise error.__cause__ or error from None
        whole = Path(folder) / path.name
        rows.to_parquet(whole)
        os.replace(whole, path)
        return len(rows)


def read_parquet(path: Path) -> Iterator[RolloutRecord]:
    """Yield the records that `write_parquet` was given.

    Raises:
        RecordError: the file holds something else, or nothing.
    """
    from datasets import load_dataset

    number = 0
    rows = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    for number, row in enumerate(rows, start=1):
        texts = {name: json.loads(row[name]) for name in _JSON_FIELDS if name in row}
        yield check_record(row | texts, f"{path}, row {number}")
    if number == 0:
        raise EmptyRecordError(f"{path} holds no recorded trajectory.")


def _rows(source: str) -> Iterator[dict[str, Any]]:
    for record in read_rollouts(source):
        row = record.model_dump(by_alias=True)
        texts = {name: to_json(row[name], ensure_ascii=True) for name in _JSON_FIELDS}
        yield row | texts | {name: record[name] for name in _ADDED}


def _features() -> Any:
    """Return the columns' types, which are those of the model's fields."""
    from datasets import Features, List, Value

    kinds = {
        "integer": Value("int64"),
        "number": Value("float64"),
        "boolean": Value("bool"),
        "string": Value("string"),
    }

    def kind_of(schema: dict[str, Any]) -> Any:
        for option in schema.get("anyOf", [schema]):  # the other one is null
            if option.get("type") == "array":
                return List(kind_of(option["items"]))
            if option.get("type") in kinds:
                return kinds[option["type"]]
        return kinds["string"]

    fields = RolloutRecord.model_json_schema()["properties"]
    columns = {
        name: kinds["string"] if name in _JSON_FIELDS else kind_of(field)
        for name, field in fields.items()
    }
    tokens = dict.fromkeys(_ADDED[:2], List(kinds["integer"]))
    return Features(**columns, **tokens, logprobs=List(kinds["number"]))
