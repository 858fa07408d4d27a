"""Gather values over the processes of a run."""

from typing import cast

import torch
from accelerate import Accelerator


def gather(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor of every process; dim 0 has one process after the other."""
    return cast(torch.Tensor, accelerator.gather(tensor))


def gather_flags(accelerator: Accelerator, *flags: bool) -> list[list[bool]]:
    """Return each flag's values on all processes."""
    return gather(accelerator, torch.tensor([flags], device=accelerator.device)).T.tolist()
