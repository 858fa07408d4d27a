"""Run vLLM in this process: the engine, and everything that calls into vLLM for it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_vllm.engines.vllm.engine import VLLMRolloutEngine
    from agent_vllm.engines.vllm.options import check_engine_args
    from agent_vllm.engines.vllm.stepper import check_sleep_mode

__all__ = ["VLLMRolloutEngine", "check_engine_args", "check_sleep_mode"]

_MODULES = {
    "VLLMRolloutEngine": "engine",
    "check_engine_args": "options",
    "check_sleep_mode": "stepper",
}


def __getattr__(name: str) -> Any:  # the torch engine needs one module of this room, not the engine
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
