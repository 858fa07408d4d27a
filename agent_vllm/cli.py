"""The command line, `agent-vllm COMMAND` or `python -m agent_vllm COMMAND`.

A command is a module with `HELP`, `add_arguments(parser)` and `run(args) -> exit status`; what it
does, and the heavy imports it needs for that, are its own.
"""

import argparse
import importlib
from collections.abc import Sequence

COMMANDS: dict[str, str] = {"view": "agent_vllm.inspect.view"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status is returned."""
    parser = argparse.ArgumentParser(prog="agent-vllm", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args)
