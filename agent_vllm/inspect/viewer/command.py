"""Run the command `agent-vllm view`."""

import argparse
import sys
from pathlib import Path

from agent_vllm.inspect.viewer.live import follow
from agent_vllm.inspect.viewer.page import write_page
from agent_vllm.record import record_path

DESCRIPTION = (
    "Write recorded rollouts as one HTML page that opens without a network: messages and calls, "
    "every token with mask and logprobs, groups, timeline and reward curves. With --live, show the "
    "page while the run goes on."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "rollouts", type=Path, help="rollouts.jsonl or its export, or the folder of the run"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the page (default: beside the record, with .html)"
    )
    parser.add_argument(
        "--limit", type=int, default=1000, help="newest trajectories to show (default: 1000)"
    )
    parser.add_argument(
        "--live", action="store_true", help="show the page on 127.0.0.1 and follow the file"
    )
    parser.add_argument("--port", type=int, default=8765, help="for --live (default: 8765)")


def run(args: argparse.Namespace) -> int:
    """Write or serve the page. Wrong input is reported as one line on standard error."""
    rollouts = record_path(args.rollouts)
    try:
        if args.limit < 1:
            raise ValueError(f"--limit must be 1 or more, got {args.limit}.")
        if args.live:
            follow(rollouts, limit=args.limit, port=args.port)
        else:
            output = args.output or rollouts.with_suffix(".html")
            data = write_page(rollouts, output, limit=args.limit)
            print(f"{output}: {len(data.rows)} of {data.num_trajectories} trajectories")
    except (OSError, ValueError) as error:
        print(f"agent-vllm view: {error}", file=sys.stderr)
        return 1
    return 0
