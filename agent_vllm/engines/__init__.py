"""Engines: who turns ids into ids. `create_rollout_engine` picks one by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.engines.base import RolloutEngine, RolloutResult
from agent_vllm.engines.server.engine import VLLMServerRolloutEngine
from agent_vllm.engines.torch import TorchRolloutEngine
from agent_vllm.engines.vllm.engine import VLLMRolloutEngine

__all__ = [
    "ENGINE_NAMES",
    "RolloutEngine",
    "RolloutResult",
    "TorchRolloutEngine",
    "VLLMRolloutEngine",
    "VLLMServerRolloutEngine",
    "create_rollout_engine",
]

_ENGINES: dict[str, Callable[..., RolloutEngine]] = {
    "torch": TorchRolloutEngine,
    "vllm": VLLMRolloutEngine,
    "vllm-server": VLLMServerRolloutEngine,
}
ENGINE_NAMES = tuple(_ENGINES)


def create_rollout_engine(
    name: str,
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> RolloutEngine:
    """The engine of that name, one of `ENGINE_NAMES`; `options` are its own keyword arguments.

    Raises:
        ValueError: no engine has that name.
    """
    if name not in _ENGINES:
        raise ValueError(f"`rollout_engine` must be one of {ENGINE_NAMES}, got {name!r}.")
    return _ENGINES[name](model, tokenizer, **options)
