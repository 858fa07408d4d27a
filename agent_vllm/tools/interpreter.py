"""Offer a Python interpreter as a tool.

Invariant: code runs in a process of its own, under limits; the trainer's stdout and memory are out
of its reach.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.tools.isolation import isolated_file
from agent_vllm.tools.tool import Tool

_PROGRAM = Path(__file__).with_name("python_process.py")
_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python code."}},
    "required": ["code"],
}
_FUNCTION: dict[str, Any] = {
    "name": "python",
    "description": "Run Python code. Returns what it prints and the value of its last expression. "
    "Each call starts anew: no variables are kept.",
    "parameters": _PARAMETERS,
}


def _not_set(code: str) -> str:
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False)
class PythonInterpreter(Tool):
    """Run the model's Python code in a process per call.

    ```python
    trainer = AgentGRPOTrainer(..., tools=[PythonInterpreter(cpu_s=5)])
    ```

    The model reads what the code writes to stdout and stderr, then the `repr` of its last
    expression or its traceback. A call starts in an empty folder that is deleted afterwards, and
    everything that it started ends with it. As many calls run concurrently as there are CPUs,
    unless `max_concurrency` differs. It is no sandbox: see `isolated`.

    Attributes:
        schema: as of `Tool`; by default a tool `python` with the argument `code`.
        function: set by this class.
        cpu_s: processor time per call.
        memory_mb: address space of the process.
        max_output_chars: longer output is cut and marked.
    """

    function: Callable[..., Any] = _not_set
    cpu_s: int = 10
    memory_mb: int = 1024
    max_output_chars: int = 10_000

    def __post_init__(self) -> None:
        if not self.schema:
            object.__setattr__(self, "schema", {"type": "function", "function": _FUNCTION})
        if self.function is _not_set:
            object.__setattr__(self, "function", self._runner())
        if self.max_concurrency is None:
            object.__setattr__(self, "max_concurrency", os.cpu_count())
        super().__post_init__()

    def _runner(self) -> Callable[..., Any]:
        limits = {"cpu_s": self.cpu_s, "memory_mb": self.memory_mb}
        for name, value in {**limits, "max_output_chars": self.max_output_chars}.items():
            if not isinstance(value, int) or value <= 0:
                raise ToolDefinitionError(
                    f"`{name}` of `PythonInterpreter` must be a whole number above 0, got "
                    f"{value!r}."
                )
        max_chars = self.max_output_chars
        # as JSON a character has up to 12 bytes: output and traceback
        run = isolated_file(
            _PROGRAM, "run", **limits, max_output_bytes=max(1_000_000, 24 * max_chars + 1000)
        )

        async def python(code: str) -> str:
            return await run(code=code, max_output_chars=max_chars)

        return python
