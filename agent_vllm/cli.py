"""The command line, `agent-vllm COMMAND` or `python -m agent_vllm COMMAND`.

A command is a module with `DESCRIPTION`, `add_arguments(parser)` and `run(args) -> exit status`.
Its module and the heavy imports behind it are loaded only when the command is given.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from agent_vllm import __version__
from agent_vllm.errors import AgentVLLMError


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command: where it lives, and its line in `--help`."""

    module: str
    help: str
    takes_rest: bool = False  # what stands after `--` is `args.rest`


COMMANDS: dict[str, Command] = {
    "doctor": Command(
        module="agent_vllm.inspect.doctor",
        help="check a model, its chat template and its engines before training",
    ),
    "export": Command(
        module="agent_vllm.record.export",
        help="write recorded rollouts as Parquet, or as rows for supervised fine-tuning",
    ),
    "replay": Command(
        module="trl_integration.replay_command",
        help="rewards, tensors and loss of recorded rollouts, without an engine",
    ),
    "serve": Command(
        module="agent_vllm.engines.server.launcher",
        help="start a vLLM server for rollouts",
        takes_rest=True,
    ),
    "simulate": Command(
        module="agent_vllm.inspect.simulate.command",
        help="predict step time and idle shares of a layout",
    ),
    "trace": Command(
        module="agent_vllm.inspect.trace",
        help="write recorded rollouts as a Chrome trace, for Perfetto",
    ),
    "view": Command(
        module="agent_vllm.inspect.viewer.command", help="look at recorded rollouts in a browser"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(arguments[0]) if arguments else None
    rest: list[str] = []
    if command is not None and command.takes_rest and "--" in arguments:
        end = arguments.index("--")
        arguments, rest = arguments[:end], arguments[end + 1 :]
    args = _parser(arguments[:1]).parse_args(arguments, argparse.Namespace(rest=rest))
    try:
        return args.run(args)
    except (AgentVLLMError, FileNotFoundError) as error:  # they say what to do
        sys.exit(f"agent-vllm: {error}")


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser that knows every command by name, and the given one's arguments."""
    parser = argparse.ArgumentParser(prog="agent-vllm", description="Tools around rollouts.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        if name not in given:
            commands.add_parser(name, help=command.help)
            continue
        module = importlib.import_module(command.module)
        subparser = commands.add_parser(name, help=command.help, description=module.DESCRIPTION)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser
