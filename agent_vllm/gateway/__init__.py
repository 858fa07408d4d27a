"""Train any agent as it is: an OpenAI-compatible endpoint in front of any engine.

`rollout` runs agents, `agent` is one run of one, `server` speaks HTTP, `fields` checks requests,
`session` makes a trajectory of them, `history` finds what a conversation continues. Invariant: each
run has a key of its own, and what is sampled with it is in its trajectory once.
"""

from agent_vllm.gateway.agent import Agent, check_agent
from agent_vllm.gateway.rollout import check_agent_limits, rollout_agent, rollout_agent_async
from agent_vllm.gateway.server import MODEL, Gateway
from agent_vllm.gateway.session import Session

__all__ = [
    "MODEL",
    "Agent",
    "Gateway",
    "Session",
    "check_agent",
    "check_agent_limits",
    "rollout_agent",
    "rollout_agent_async",
]
