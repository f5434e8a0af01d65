"""Convert a vertex set from a mask to the indices of its vertices."""

from __future__ import annotations

from torch import Tensor

from ..._shared.operation import Compiled, Operation, trial_of
from ..._shared.threads import COMPILE_FROM, enough_steps
from . import reference
from .reference import mask_from_indices as mask_from_indices

OPERATION = Operation(
    "indices",
    "converting masks to vertex numbers",
    cpu=Compiled(f"for batches, from {COMPILE_FROM:,} steps on", trial_of(__name__, "cpu")),
)


def indices_from_mask(mask: Tensor, width: int) -> Tensor:
    """Return sorted int64 indices (..., width) of a mask (..., n), padded with -1."""
    if mask.device.type == "cpu" and mask.dim() == 2 and enough_steps(mask.shape[0] * mask.numel()):
        from .cpu import indices_from_mask as compiled

        return compiled(mask, width)
    return reference.indices_from_mask(mask, width)
