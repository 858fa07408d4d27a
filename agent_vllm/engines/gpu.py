"""Share a GPU between a learner and the engine of its process.

Owns which GPU that is, and the order of their work on it. Invariant: an engine reads weights that
the optimizer has finished, and the learner goes on when the engine has read them.
"""

import torch


def gpu_of(model: object) -> int | None:
    """Return the index of the model's GPU, or this thread's for a path; None without CUDA."""
    if isinstance(model, torch.nn.Module):
        device = next(model.parameters()).device
        if device.type == "cuda" and device.index is not None:
            return device.index
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def use_gpu(gpu: int | None) -> None:
    """Make it this thread's GPU; a new thread's is GPU 0."""
    if gpu is not None:
        torch.cuda.set_device(gpu)


def finish_work(gpu: int | None) -> None:
    """Wait for all that was queued on the GPU, on whichever stream."""
    if gpu is not None:
        torch.cuda.synchronize(gpu)
