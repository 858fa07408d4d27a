"""Run TRL's GRPO trainer with rollouts by `agent_vllm`."""

from trl_integration.config import AgentGRPOConfig
from trl_integration.trainer import AgentGRPOTrainer

__all__ = ["AgentGRPOConfig", "AgentGRPOTrainer"]
