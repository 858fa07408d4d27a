"""Turn recorded trajectories into rows for supervised fine-tuning with TRL's `SFTTrainer`.

Owns the two forms that the trainer takes. Invariant: the token form has a label exactly where a
token was sampled.
"""

from collections.abc import Mapping
from typing import Any

from agent_vllm.errors import RecordError
from agent_vllm.record.schema import RolloutRecord

NO_LABEL = -100  # PyTorch's `ignore_index`

Schemas = Mapping[str, Mapping[str, Any]]  # of tools, by name


def token_row(record: RolloutRecord) -> dict[str, list[int]]:
    """Return a trajectory's ids and labels, both `[P + C]`; P prompt and C completion tokens.

    Raises:
        RecordError: the record is redacted.
    """
    trajectory = record.trajectory
    ids, mask = trajectory.completion_ids, trajectory.completion_mask
    labels = [
        token if is_sampled else NO_LABEL for token, is_sampled in zip(ids, mask, strict=True)
    ]
    input_ids = record.prompt_ids + ids
    if min(input_ids, default=0) < 0:
        raise RecordError(
            f"{record.id} has redacted tokens (id -1), which no model can read. Leave it out with "
            "`--where`, or export the messages with `--to sft-messages`."
        )
    return {
        "input_ids": input_ids,
        "labels": [NO_LABEL] * len(record.prompt_ids) + labels,
    }


def message_row(record: RolloutRecord, schemas: Schemas) -> dict[str, list[Any]]:
    """Return a trajectory's messages, and the schemas of its tools, which a record only names.

    Raises:
        RecordError: a schema is missing.
    """
    missing = [name for name in record.tools if name not in schemas]
    if missing:
        raise RecordError(
            f"`--tools` must define the tools of every trajectory, got none named {missing[0]!r}, "
            f"which {record.id} has. Pass the Python file that defines it."
        )
    return {"messages": record.messages, "tools": [dict(schemas[name]) for name in record.tools]}


def token_features() -> Any:
    """Return the column types of `token_row`, as a `datasets.Features`."""
    from datasets import Features, List, Value

    return Features(input_ids=List(Value("int64")), labels=List(Value("int64")))


def message_features() -> Any:
    """Return the column types of `message_row`: JSON, so that no row gets another's keys."""
    from datasets import Features, Json, List

    return Features(messages=List(Json()), tools=List(Json()))
