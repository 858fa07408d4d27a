"""VLLMServerRolloutEngine: the name that is kept for engines in `vllm serve` processes.

Not supported yet: building one is refused, so that a script that asks for it fails at once.
"""

from typing import Any, NoReturn

from agent_vllm.engines.base import RolloutEngine
from agent_vllm.errors import EngineUnavailableError


class VLLMServerRolloutEngine(RolloutEngine):
    """Refuses to be built.

    Raises:
        EngineUnavailableError: always; names the engines that exist.
    """

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        raise EngineUnavailableError(
            "Engines in `vllm serve` processes are not supported yet. Use the engine in this "
            'process: rollout_engine="vllm", or "torch".'
        )
