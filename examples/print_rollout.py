"""Print recorded rollouts token by token: sampled tokens on green, observed ones grey.

python examples/print_rollout.py runs/tiny-agent/rollouts.jsonl --num 3
python examples/print_rollout.py ... --svg docs/rollout.svg
"""

import argparse
import itertools
import math
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_vllm.record import RolloutRecord, read_rollouts

# Plain SVG: rich's own template loads fonts from the network.
SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px;
line-height: {line_height}px; }} {styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{width}" height="{height}"/></clipPath>
{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#16191d"/>
<g transform="translate(12, 12)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def coloured(record: RolloutRecord) -> Text:
    """Return the whole sequence; a brighter green means a less likely sampled token."""
    text = Text("".join(record.texts_of(record["prompt_ids"])), style="grey50")
    pieces = record.texts_of(record["completion_ids"])
    columns = (pieces, record["completion_mask"], record["logprobs"])
    for piece, sampled, logprob in zip(*columns, strict=True):
        green = int(90 + 130 * (1 - math.exp(logprob)))
        text.append(piece, style=f"white on rgb(20,{green},60)" if sampled else "grey70")
    return text


def summary(record: RolloutRecord) -> str:
    sampled, total = sum(record["completion_mask"]), len(record["completion_ids"])
    scored = {name: value for name, value in record["rewards"].items() if value is not None}
    rewards = ", ".join(f"{name} {value:g}" for name, value in scored.items())
    return (
        f"step {record['step']}, {record['stop_reason']}, {rewards}, "
        f"advantage {record['advantage'] or 0:+.2f}, {sampled}/{total} tokens sampled"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl of a run")
    parser.add_argument("--skip", type=int, default=0, help="records to skip; default: 0")
    parser.add_argument("--num", type=int, default=1, help="records to print; default: 1")
    parser.add_argument("--svg", type=Path, help="also write an SVG file")
    arguments = parser.parse_args()
    console = Console(record=arguments.svg is not None, width=100, highlight=False)
    records = read_rollouts(arguments.rollouts)
    stop = arguments.skip + arguments.num
    for record in itertools.islice(records, arguments.skip, stop):
        console.print(coloured(record))
        console.print(summary(record), style="bold")
    if arguments.svg is not None:
        console.save_svg(str(arguments.svg), title="", code_format=SVG)


if __name__ == "__main__":
    main()
