"""Find the True entries of masks in a single pass."""

from __future__ import annotations

import numpy as np
import torch
from numba import b1, i8, void
from torch import Tensor

from ..._shared.jit import jit


def indices_from_mask(mask: Tensor, width: int) -> Tensor:
    """As `reference.indices_from_mask`, for masks (B, n)."""
    output = np.full((len(mask), width), -1, dtype=np.int64)
    indices(mask.contiguous().numpy(), output)
    return torch.from_numpy(output)


@jit(ahead=[void(b1[:, ::1], i8[:, ::1])])
def indices(mask, output):
    """Write the True positions of every row of `mask`, in order; the rest of `output` is not touched."""
    size, n = mask.shape
    places = np.empty(n + 1, np.int64)
    for b in range(size):
        count = 0
        for i in range(n):  # no branch: half of the predictions would be wrong
            places[count] = i
            count += np.int64(mask[b, i])
        for place in range(min(count, output.shape[1])):
            output[b, place] = places[place]
