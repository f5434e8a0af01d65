"""Compute f of every instance in a single pass over W, without copies.

In torch, every operation would take a pass and a temporary of the input's size.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import b1, f4, f8, void
from torch import Tensor

from ..._shared.jit import jit
from ..._shared.threads import split_batch
from .reference import Sums


def sums(W: Tensor, mask: Tensor) -> Sums:
    """As `reference.sums`, with the batch shared among threads."""
    arrays = W.reshape(-1, *W.shape[-2:]).contiguous().numpy()
    outputs = tuple(np.zeros(len(arrays)) for _ in Sums._fields)
    split_batch(objective, (arrays, mask.reshape(-1, mask.shape[-1]).contiguous().numpy(), *outputs))
    return Sums(*(torch.from_numpy(each).reshape(W.shape[:-2]) for each in outputs))


@jit(ahead=[void(f[:, :, ::1], b1[:, ::1], f8[::1], f8[::1], f8[::1]) for f in (f4, f8)])
def objective(W, mask, value, rest, size):
    """Compute f and what its rounding left by compensated sums, 32 digits relative to `size`, the sum of |W_ij|.

    Sums run down the columns to make the inner loop a vector loop (Knuth's exact addition: Ogita, Rump & Oishi, 2005).
    """
    n = W.shape[1]
    high, low, sizes = np.empty(n), np.empty(n), np.empty(n)
    for b in range(W.shape[0]):
        for j in range(n):
            high[j], low[j], sizes[j] = 0.0, 0.0, 0.0
        for i in range(n):
            if mask[b, i]:
                for j in range(n):
                    before, more = high[j], np.float64(W[b, i, j])
                    after = before + more
                    part = after - before
                    low[j] += (before - (after - part)) + (more - part)
                    high[j] = after
                    sizes[j] += abs(more)
        total, lost, size[b] = 0.0, 0.0, 0.0
        for j in range(n):
            if mask[b, j]:
                after = total + high[j]
                part = after - total
                lost += (total - (after - part)) + (high[j] - part) + low[j]
                total = after
                size[b] += sizes[j]
        value[b] = total + lost
        rest[b] = lost - (value[b] - total)
