"""Whether the learner's numbers are finite.

Owns how a tensor with NaN or infinity is found and reported. Invariant: it is reported as the
learner's, by name, before anything is saved or the engine is blamed.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.trainer_utils import get_last_checkpoint

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def non_finite_weight(model: PreTrainedModel) -> str | None:
    """Return the first parameter that has NaN or infinity on this process; None if there is none."""
    return _first_non_finite(model.named_parameters())


def non_finite_gradient(model: PreTrainedModel) -> str | None:
    """Return the first parameter whose gradient has NaN or infinity on this process, or None."""
    return _first_non_finite((name, parameter.grad) for name, parameter in model.named_parameters())


@torch.no_grad()
def _first_non_finite(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> str | None:
    local = {name: _local(tensor) for name, tensor in tensors if tensor is not None}
    local = {name: tensor for name, tensor in local.items() if tensor.dtype in _DTYPES}
    if torch.nn.utils.get_total_norm(local.values()).isfinite():  # one pass, one synchronisation
        return None
    # the norm of large but finite values may overflow: then there is no name
    return next((name for name, tensor in local.items() if not tensor.isfinite().all()), None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divergence_message(what: str, step: int, output_dir: str) -> str:
    """
    Return what a run with a diverged learner ends with.

    Args:
        what: such as "the gradient of `lm_head.weight`".
        step: optimizer steps made so far.
        output_dir: its checkpoints are finite, because none is written from a learner that is not.
    """
    checkpoint = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    resume = "There is no earlier checkpoint."
    if checkpoint is not None:
        resume = (
            "Go on from the last finite checkpoint: "
            f"`trainer.train(resume_from_checkpoint={checkpoint!r})`."
        )
    return (
        f"The learner has diverged: {what} has NaN or infinity after {step} optimizer steps. Nothing "
        f"was saved. {resume} Lower `learning_rate` or `max_grad_norm`."
    )
