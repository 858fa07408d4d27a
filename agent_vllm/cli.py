"""The command line, `agent-vllm COMMAND` or `python -m agent_vllm COMMAND`.

A command is a module with `HELP`, `add_arguments(parser)` and `run(args) -> exit status`; what it
does, and the heavy imports it needs for that, are its own.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from agent_vllm.errors import AgentVLLMError

COMMANDS: dict[str, str] = {
    "doctor": "agent_vllm.inspect.doctor",
    "export": "agent_vllm.inspect.export",
    "replay": "agent_vllm.inspect.replay_command",
    "serve": "agent_vllm.engines.servers.serve",
    "simulate": "agent_vllm.simulate.command",
    "trace": "agent_vllm.inspect.trace",
    "view": "agent_vllm.inspect.view",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status is returned."""
    parser = argparse.ArgumentParser(prog="agent-vllm", description="Tools around rollouts.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (AgentVLLMError, FileNotFoundError) as error:  # they say what to do
        sys.exit(f"agent-vllm: {error}")
