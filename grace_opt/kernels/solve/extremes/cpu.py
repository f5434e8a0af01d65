"""Finite or not, the largest absolute entry, and the deviation from symmetry, in a single pass over W."""

from __future__ import annotations

import numpy as np
import torch
from numba import b1, f4, f8, void
from torch import Tensor

from ..._shared.inner import SIDE, differ, largest_bits
from ..._shared.jit import inlined, jit
from ..._shared.threads import split_batch
from .reference import Extremes


def extremes_of(W: Tensor) -> Extremes:
    """As `reference.extremes`, with the batch shared among threads."""
    arrays = W.reshape(-1, *W.shape[-2:]).contiguous().numpy()
    outputs = np.zeros(len(arrays), np.bool_), np.zeros(len(arrays)), np.zeros(len(arrays))
    split_batch(extremes, (arrays, *outputs))
    outputs[1][~outputs[0]] = 0.0
    return Extremes(*(torch.from_numpy(one).reshape(W.shape[:-2]) for one in outputs))


@jit
def largest_row(W):
    """Return a row of W with an entry that is not finite or, if there is none, with the largest |W_ij|."""
    row, most = 0, largest_bits(W[0])
    for i in range(1, W.shape[0]):
        size = largest_bits(W[i])
        if size > most:
            row, most = i, size
    return W[row]


@jit(ahead=[void(f[:, :, ::1], b1[::1], f8[::1], f8[::1]) for f in (f4, f8)])
def extremes(W, finite, largest, asymmetry):
    """Compute per instance whether W is finite, and if so max |W_ij| and max |W_ij - W_ji| (in float64)."""
    n = W.shape[1]
    whole = n // SIDE * SIDE
    for b in range(W.shape[0]):
        here = W[b]
        row = largest_row(here)
        most, usual = 0.0, True
        for j in range(n):
            size = np.float64(abs(row[j]))
            most = max(most, size)
            usual &= size < np.inf  # nor is it if not a number
        largest[b], finite[b] = most, usual
        if not finite[b]:
            continue
        worst = 0.0
        for i in range(0, whole, SIDE):
            for j in range(0, i + 1, SIDE):
                if differ(here, i, j):
                    worst = max(worst, _largest_difference(here, i, i + SIDE, j, j + SIDE))
        asymmetry[b] = max(worst, _largest_difference(here, whole, n, 0, n))


@inlined
def _largest_difference(W, top, bottom, left, right):
    worst = 0.0
    for i in range(top, bottom):
        for j in range(left, right):
            worst = max(worst, abs(np.float64(W[i, j]) - np.float64(W[j, i])))
    return worst
