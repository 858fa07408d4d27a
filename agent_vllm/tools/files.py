"""Load the tools of a Python file, as command lines name them.

Invariant: what the file imports is no tool of it, and its names with an underscore are private.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_vllm.tools.tool import Tool


def tools_in_file(path: Path) -> list[Tool | Callable[..., Any]]:
    """Return every public function and `Tool` of a Python file, in order.

    Raises:
        ValueError: it is no Python file, or it ends the process.
        Exception: whatever the file raises when it is imported.
    """
    spec = importlib.util.spec_from_file_location(f"tools_in_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"`--tools` must be a Python file (.py), got {str(path)!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise ValueError(f"{path} ends the process when it is imported (exit {error}).") from error
    return [
        value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, Tool) or getattr(value, "__module__", None) == spec.name)
        and not isinstance(value, type)
        and callable(getattr(value, "function", value))
    ]
