"""Define every error that this package raises on purpose.

All share one root, and each is also a standard error. A tool's trouble is never raised: it becomes
the result of the call.
"""


class AgentVLLMError(Exception):
    """Root of all errors raised by `agent_vllm` and `trl_integration`."""


class ChatTemplateError(AgentVLLMError, ValueError):
    """The chat template can't be used for multi-turn tool rollouts; says why and what to do."""


class ToolDefinitionError(AgentVLLMError, ValueError):
    """A tool can't be offered to the model: no name, hints or docstring, or a duplicate name."""


class EnvironmentDefinitionError(AgentVLLMError, ValueError):
    """An environment can't be used: no `reset`, a method without hints, or an unknown name."""


class EngineError(AgentVLLMError, RuntimeError):
    """The engine could not serve a request; its trajectory ends as `engine_error`."""


class EngineDeadError(EngineError):
    """The engine serves no more requests: it hangs, its thread failed, or it was closed."""


class EngineBusyError(EngineError):
    """The operation needs an idle engine, and requests were in flight."""


class EngineUnavailableError(AgentVLLMError, ImportError):
    """The engine's package is not installed; names the extra that installs it."""


class UnsupportedModelError(AgentVLLMError, ValueError):
    """The engine can't run this model; says which engine can."""


class InvalidRequestError(AgentVLLMError, ValueError):
    """No engine could serve this request: empty, out of vocabulary, or too long."""


class WeightSyncError(AgentVLLMError, RuntimeError):
    """The learner's weights do not fit the engine: a name or shape is missing or unknown."""


class LearnerDivergedError(AgentVLLMError, FloatingPointError):
    """The learner is not finite; names the parameter and the last finite checkpoint."""


class RunCheckError(AgentVLLMError, RuntimeError):
    """A run learns nothing, or something wrong, and `on_warning="stop"` is set; says what to do."""


class RecordError(AgentVLLMError, ValueError):
    """A record of rollouts can't be read, joined or replayed; names the file and line."""


class EmptyRecordError(RecordError):
    """The file holds no recorded trajectory; an ongoing run may not have written one yet."""


class ToolServerError(AgentVLLMError, ConnectionError):
    """A tool server can't be started or reached, or does not speak MCP; says which."""


class VLLMServerError(AgentVLLMError, ConnectionError):
    """A vLLM server can't be reached or lacks what the engine needs; says how to start it."""


class ScenarioError(AgentVLLMError, ValueError):
    """A simulation's input is invalid: a distribution, a rate or a number; names it."""
