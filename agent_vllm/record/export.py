"""Write recorded rollouts as Parquet, through `datasets`.

One row a trajectory. Fields whose form varies from row to row are JSON text in it, so that what is
read back is what was recorded.
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

_AS_JSON = ("messages", "rewards", "row", "token_texts", "tool_results", "spans")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl of a run")
    parser.add_argument("output", type=Path, help="the .parquet file to write")


def run(args: argparse.Namespace) -> int:
    if args.output.suffix != ".parquet":
        raise SystemExit(f"`output` must end in .parquet, got {args.output}.")
    print(f"wrote {write_parquet(args.rollouts, args.output)} trajectories to {args.output}")
    return 0


def write_parquet(source: str | Path, path: str | Path) -> int:
    """Convert a record; the file appears once it is whole.

    Returns:
        The number of trajectories.

    Raises:
        RecordError: as `read_rollouts`.
    """
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        rows = _dataset(source, folder)
        whole = Path(folder) / path.name
        rows.to_parquet(whole)
        os.replace(whole, path)
    return len(rows)


def _dataset(source: str | Path, folder: str) -> Any:
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    options: dict[str, Any] = {"features": _features(), "cache_dir": folder}
    try:
        return Dataset.from_generator(_rows, gen_kwargs={"source": str(source)}, **options)
    except DatasetGenerationError as error:  # around what `read_rollouts` raised
        raise error.__cause__ or error from None


def read_parquet(path: Path) -> Iterator[RolloutRecord]:
    """What `write_parquet` was given.

    Raises:
        RecordError: the file holds something else, or nothing.
    """
    from pyarrow import parquet

    number = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                number += 1
                texts = {name: json.loads(row[name]) for name in _AS_JSON if name in row}
                yield check_record(row | texts, f"{path}, row {number}")
    if number == 0:
        raise EmptyRecordError(f"{path} holds no recorded trajectory.")


def _rows(source: str) -> Iterator[dict[str, Any]]:
    for record in read_rollouts(source):
        texts = {name: to_json(record[name], ensure_ascii=True) for name in _AS_JSON}
        yield {name: {**record, **texts}[name] for name in _features()}


def _features() -> Any:
    from datasets import Features, List, Value

    text, whole, number, flag = (Value(kind) for kind in ("string", "int64", "float64", "bool"))
    return Features(
        schema=whole,
        id=text,
        session=whole,
        mode=text,
        step=whole,
        rank=whole,
        rollout=whole,
        group=whole,
        generation=whole,
        seed=whole,
        time=number,
        started=number,
        temperature=number,
        max_model_len=whole,
        tools=List(text),
        advantage=number,
        trained=flag,
        stop_reason=text,
        error=text,
        thinking=flag,
        num_prompt_messages=whole,
        prompt_ids=List(whole),
        completion_ids=List(whole),
        completion_mask=List(whole),
        logprobs=List(number),
        learner_logprobs=List(number),
        policy_versions=List(whole),
        turn_outputs=List(text),
        **dict.fromkeys(_AS_JSON, text),
    )
