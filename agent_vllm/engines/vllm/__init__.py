"""Run vLLM in this process: the engine, and everything that calls into vLLM for it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_vllm.engines.vllm.engine import VLLMRolloutEngine
    from agent_vllm.engines.vllm.stepper import check_sleep_mode

__all__ = ["VLLMRolloutEngine", "check_sleep_mode"]


def __getattr__(name: str) -> Any:  # the torch engine needs one module of this room, not the engine
    if name == "VLLMRolloutEngine":
        from agent_vllm.engines.vllm.engine import VLLMRolloutEngine

        return VLLMRolloutEngine
    if name == "check_sleep_mode":
        from agent_vllm.engines.vllm.stepper import check_sleep_mode

        return check_sleep_mode
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
