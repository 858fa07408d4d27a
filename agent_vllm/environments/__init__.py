"""Run environments and simulated users, one per trajectory.

`pool` keeps the instances, `instance` runs one, `user` asks for the user's next message.
"""

from agent_vllm.environments.pool import LIFECYCLE, Environments, Factory, StartedEnvironment
from agent_vllm.environments.user import User, UserFailed, ask_user, user_suffix_ids

__all__ = [
    "LIFECYCLE",
    "Environments",
    "Factory",
    "StartedEnvironment",
    "User",
    "UserFailed",
    "ask_user",
    "user_suffix_ids",
]
