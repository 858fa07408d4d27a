"""Keep folders that are expensive to make: under `AGENT_VLLM_CACHE`, or `~/.cache/agent_vllm`."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


def made_once(name: str, sources: Sequence[str | Path], make: Callable[[Path], object]) -> Path:
    """Return the folder of that name; `make` fills it if it does not exist yet.

    A digest of the source files is part of the name, so an edited recipe never uses an old folder.
    The folder is filled under a temporary name and renamed when complete.
    """
    cache = Path(os.environ.get("AGENT_VLLM_CACHE") or Path.home() / ".cache" / "agent_vllm")
    digest = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources))
    folder = cache / f"{name}-{digest.hexdigest()[:8]}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=cache, prefix=f".{folder.name}-"))
    try:
        make(unfinished)
        with contextlib.suppress(OSError):  # another process made the same folder first
            unfinished.rename(folder)
        if not folder.is_dir():
            raise OSError(f"{folder} could not be written.")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
