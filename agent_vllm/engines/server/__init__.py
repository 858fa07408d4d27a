"""Use vLLM in other processes: an engine over `vllm serve` processes, and their launcher."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_vllm.engines.server.engine import VLLMServerRolloutEngine

__all__ = ["VLLMServerRolloutEngine"]


def __getattr__(name: str) -> Any:  # a server's worker imports one module of this room
    if name == "VLLMServerRolloutEngine":
        from agent_vllm.engines.server.engine import VLLMServerRolloutEngine

        return VLLMServerRolloutEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
