"""Run TRL's GRPO trainer with rollouts by `agent_vllm`.

Names are imported on first use, so that the command line explains itself without loading TRL.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_integration.config import AgentGRPOConfig
    from trl_integration.trainer import AgentGRPOTrainer

__all__ = ["AgentGRPOConfig", "AgentGRPOTrainer"]

_MODULES = {"AgentGRPOConfig": "config", "AgentGRPOTrainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agent_vllm.engines.vllm.host_state import host_process_kept

    with host_process_kept():  # TRL imports vLLM, if it is installed
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
