"""Write recorded rollouts as Parquet through `datasets`: whole records, or rows for fine-tuning.

Invariant: the file appears once it is whole.
"""

import argparse
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_vllm.errors import EmptyRecordError
from agent_vllm.record import parquet, sft
from agent_vllm.record.reader import read_rollouts
from agent_vllm.record.schema import RolloutRecord
from agent_vllm.record.selection import FIGURES, matching_ids
from agent_vllm.tools import tools_by_name, tools_in_file

DESCRIPTION = (
    "Write recorded rollouts as a Parquet file, one row per trajectory: for pandas, polars or "
    "DuckDB (every other command reads it like the original), or for TRL's SFTTrainer."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Describe one form of a row."""

    help: str
    row: Callable[..., dict[str, Any]]  # of a record, and of the tools' schemas if it needs them
    features: Callable[[], Any]
    needs_tools: bool = False
    needs_sampled: bool = False  # a trajectory without a sampled token teaches nothing


FORMS = {
    "records": Form(help="the whole record", row=parquet.to_row, features=parquet.features),
    "sft": Form(
        help="`input_ids` and `labels`: trains exactly the tokens that were sampled",
        row=sft.token_row,
        features=sft.token_features,
        needs_sampled=True,
    ),
    "sft-messages": Form(
        help="`messages` and `tools`, for another model or template; needs --tools",
        row=sft.message_row,
        features=sft.message_features,
        needs_tools=True,
        needs_sampled=True,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl, or the folder of the run")
    parser.add_argument("output", type=Path, help="the .parquet file to write")
    told = "; ".join(f"{name}: {form.help}" for name, form in FORMS.items())
    parser.add_argument("--to", choices=FORMS, default="records", help=told)
    parser.add_argument(
        "--where",
        metavar="EXPRESSION",
        help=f"only trajectories for which it is true, such as 'reward >= 1'. Names: {FIGURES}",
    )
    parser.add_argument(
        "--tools", type=Path, metavar="FILE", help="the Python file that defines the tools"
    )


def run(args: argparse.Namespace) -> int:
    if args.output.suffix != ".parquet":
        raise SystemExit(f"`output` must end in .parquet, got {args.output}.")
    if (args.tools is not None) != FORMS[args.to].needs_tools:
        raise SystemExit(
            f"`--tools` must be given with `--to sft-messages` alone, got --to {args.to}."
        )
    number = write_parquet(
        args.rollouts, args.output, to=args.to, where=args.where, tools=args.tools
    )
    print(f"wrote {number} trajectories to {args.output}")
    return 0


def write_parquet(
    source: str | Path,
    path: str | Path,
    *,
    to: str = "records",
    where: str | None = None,
    tools: Path | None = None,
) -> int:
    """Convert a record and return the number of trajectories.

    Args:
        to: one of `FORMS`.
        where: an expression that chooses trajectories; see `matching_ids`.
        tools: the file that defines the tools, for `"sft-messages"`.

    Raises:
        RecordError: as `read_rollouts` and `matching_ids`; or no trajectory has a sampled token.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    form, path = FORMS[to], Path(path)
    row = form.row
    if tools is not None:
        offered = tools_by_name(tools_in_file(tools))
        row = functools.partial(row, schemas={name: t.schema for name, t in offered.items()})
    chosen = None if where is None else matching_ids(source, where)

    def rows() -> Iterator[dict[str, Any]]:
        for record in read_rollouts(source):
            if (chosen is None or record.id in chosen) and _is_wanted(record, form):
                yield row(record)

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        try:
            table = Dataset.from_generator(rows, features=form.features(), cache_dir=folder)
        except DatasetGenerationError as error:  # around what `read_rollouts` raised
            raise error.__cause__ or error from None
        except ValueError as error:
            raise EmptyRecordError(f"No trajectory of {source} has a sampled token.") from error
        whole = Path(folder) / path.name
        table.to_parquet(whole)
        os.replace(whole, path)
        return len(table)


def _is_wanted(record: RolloutRecord, form: Form) -> bool:
    return not form.needs_sampled or record.trajectory.num_sampled_tokens > 0
