"""Write a learner's config where vLLM reads a model from.

Owns the folder. Invariant: on a GPU the same config has the same folder in every run, as vLLM's
compile cache is keyed by the path.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedConfig


@contextmanager
def temporary_folder(config: PreTrainedConfig) -> Iterator[str]:
    """Yield a folder with the config, for an engine that compiles nothing."""
    with tempfile.TemporaryDirectory(prefix="agent_vllm_") as folder:
        config.save_pretrained(folder)
        yield folder


def lasting_folder(config: PreTrainedConfig, gpu: int | None) -> str:
    """Return a folder with the config beside vLLM's compile cache.

    Args:
        gpu: index of the GPU. Each has its own folder: vLLM takes every rank for the first.
    """
    from vllm import envs

    root = Path(envs.VLLM_CACHE_ROOT) / "agent_vllm"
    root.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]
    folder = root / f"{digest}-{gpu or 0}"
    if not folder.exists():
        whole = tempfile.mkdtemp(dir=root)
        config.save_pretrained(whole)
        try:
            os.rename(whole, folder)
        except OSError:  # another process was faster
            shutil.rmtree(whole)
    return str(folder)
