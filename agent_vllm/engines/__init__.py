"""Engines: token ids in, sampled ids with logprobs out. `create_rollout_engine` builds one by name.

Each engine is imported on first use.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.engines.base import RolloutEngine
from agent_vllm.engines.request import GenerationRequest
from agent_vllm.engines.tensors import RolloutResult

if TYPE_CHECKING:
    from agent_vllm.engines.server import VLLMServerRolloutEngine
    from agent_vllm.engines.torch import TorchRolloutEngine
    from agent_vllm.engines.vllm import VLLMRolloutEngine

__all__ = [
    "ENGINE_NAMES",
    "GenerationRequest",
    "RolloutEngine",
    "RolloutResult",
    "TorchRolloutEngine",
    "VLLMRolloutEngine",
    "VLLMServerRolloutEngine",
    "create_rollout_engine",
]

_ENGINES = {
    "torch": "TorchRolloutEngine",
    "vllm": "VLLMRolloutEngine",
    "vllm-server": "VLLMServerRolloutEngine",
}
_MODULES = {
    "TorchRolloutEngine": "agent_vllm.engines.torch",
    "VLLMRolloutEngine": "agent_vllm.engines.vllm",
    "VLLMServerRolloutEngine": "agent_vllm.engines.server",
}
ENGINE_NAMES = tuple(_ENGINES)


def create_rollout_engine(
    name: str,
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> RolloutEngine:
    """Build the engine of that name, one of `ENGINE_NAMES`.

    Args:
        options: the engine's own keyword arguments.

    Raises:
        ValueError: no engine has that name.
    """
    if name not in _ENGINES:
        raise ValueError(f"`rollout_engine` must be one of {ENGINE_NAMES}, got {name!r}.")
    return __getattr__(_ENGINES[name])(model, tokenizer, **options)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
