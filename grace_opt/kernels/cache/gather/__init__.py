"""Copy the kept channels of keys: by Triton on a GPU that runs its kernel, else by torch."""

from __future__ import annotations

from torch import Tensor

from ..._shared.dispatch import use_triton
from ..._shared.operation import Operation, Triton, trial_of
from . import reference

KERNEL = Triton("gather", "always", trial_of(__name__, "gpu"))
OPERATION = Operation("gather", "copying the kept channels of keys", gpu=(KERNEL,))


def gather_channels(keys: Tensor, kept_indices: Tensor) -> Tensor:
    """Copy the kept channels ``(B, H, d')`` of keys ``(B, H, S, d)`` to ``(B, H, S, d')``."""
    if use_triton(KERNEL, keys.device, "gradients are requested" if keys.requires_grad else None):
        from .gpu import gather_channels as on_chip

        return on_chip(keys, kept_indices)
    return reference.gather_channels(keys, kept_indices)
