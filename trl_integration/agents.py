"""Take an agent with a loop of its own in place of tools, environments and users.

Invariant: what the agent does by itself can't be set on the trainer too.
"""

from collections.abc import Sequence
from typing import Any

from agent_vllm.gateway import Agent, check_agent, check_agent_limits
from agent_vllm.types import Trajectory
from trl_integration.config import AgentGRPOConfig


def check_agent_arguments(agent: Agent, args: AgentGRPOConfig, **others: Any) -> None:
    """
    Refuse an agent that can't be run, and what it would leave without effect.

    Args:
        others: arguments of the trainer that the agent takes the place of.
    """
    check_agent(agent)
    check_agent_limits(args.limits())
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must be left out with an `agent`, got {value!r}: the agent brings its own."
            )


def output_column(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return the column for reward functions with what the agents returned or printed."""
    return {"agent_output": [trajectory.output for trajectory in trajectories]}
