"""Convert records to Parquet's form and back: one row per trajectory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_vllm.errors import EmptyRecordError
from agent_vllm.record.schema import RolloutRecord, check_record, to_json

_JSON_FIELDS = ("messages", "rewards", "row", "token_texts", "turns")
_ADDED = ("completion_ids", "completion_mask", "logprobs")


def to_row(record: RolloutRecord) -> dict[str, Any]:
    """Return a record as one row: what has no fixed columns as JSON text, and flat token lists."""
    row = record.model_dump(by_alias=True)
    texts = {name: to_json(row[name], ensure_ascii=True) for name in _JSON_FIELDS}
    return row | texts | {name: record[name] for name in _ADDED}


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


def features() -> Any:
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
