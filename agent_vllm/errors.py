"""Every error that this package raises on purpose: one root, and each also a standard error.

A tool's trouble is never raised; it is a result (see `tools.py`).
"""


class AgentVLLMError(Exception):
    """Root of all errors raised by `agent_vllm` and `trl_integration`."""


class ChatTemplateError(AgentVLLMError, ValueError):
    """The chat template can't be used for multi-turn tool rollouts; says why and what to do."""


class ToolDefinitionError(AgentVLLMError, ValueError):
    """A tool can't be offered to the model: no name, type hints or docstring, or a name twice."""


class EngineError(AgentVLLMError, RuntimeError):
    """The engine could not serve a request; the trajectory that asked ends as engine error."""


class EngineDeadError(EngineError):
    """The engine answers nobody any more: it hangs, its thread failed, or it was closed."""


class EngineBusyError(EngineError):
    """The engine was asked for something that needs it idle while requests were in flight."""


class EngineUnavailableError(AgentVLLMError, ImportError):
    """The engine's package is not installed; names the extra that brings it."""


class UnsupportedModelError(AgentVLLMError, ValueError):
    """The engine can't run this model; says which engine can."""


class InvalidRequestError(AgentVLLMError, ValueError):
    """A generation request that no engine could serve: empty, out of vocabulary, no room left."""


class WeightSyncError(AgentVLLMError, RuntimeError):
    """The learner's weights do not fit the engine's: a name or a shape is missing or unknown."""


class RecordError(AgentVLLMError, ValueError):
    """A file of recorded rollouts can't be read, joined or replayed; names the file and line."""


class EmptyRecordError(RecordError):
    """The file holds no recorded trajectory; a run that goes on may not have written one yet."""


class ToolServerError(AgentVLLMError, ConnectionError):
    """A tool server can't be started or reached, or what it says is no MCP; says which."""
