"""Keep vLLM from changing the process that hosts it.

vLLM replaces `torch.set_num_threads`, reseeds the global generators, edits the environment (which
tools' subprocesses would inherit) and the exception hook, and draws from torch's global generator
at every step; on a GPU it also sets the precision of float32 products. Invariant: the learner's
random stream and precision and the tools' environment are those of a process without vLLM.
"""

import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}


@contextmanager
def host_process_kept() -> Iterator[None]:
    """Restore everything that vLLM's start-up changes in the process."""
    environment, hook = dict(os.environ), sys.excepthook
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    os.environ.update(_ENVIRONMENT)
    try:
        with ExitStack() as stack:
            for kept in (random_state_kept, _matmul_precision_kept, _stdout_with_fileno):
                stack.enter_context(kept())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", FutureWarning)  # of vLLM's own imports
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.excepthook = hook
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def _matmul_precision_kept() -> Iterator[None]:
    """Restore the precision of float32 products, set for all backends at once or for each."""
    mkldnn: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    precisions = [backend.fp32_precision for backend in backends]
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set for each backend
        of_all = None
    try:
        yield
    finally:
        if of_all is not None:
            torch.set_float32_matmul_precision(of_all)
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision


@contextmanager
def _stdout_with_fileno() -> Iterator[None]:
    """Give vLLM a stdout with a file descriptor; captured output and notebooks may have none."""
    try:
        sys.stdout.fileno()
    except (OSError, AttributeError):
        with open(os.devnull, "w") as devnull, redirect_stdout(devnull):
            yield
    else:
        yield


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore torch's global generators, on the CPU and on the current GPU."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
