"""Single passes over batches of W or of masks: what the checks need to know, f, and indices, without copies.

Source: ours. In torch the same takes a pass, and a temporary of the input's size, for every operation.
"""

from __future__ import annotations

import numpy as np

from .._shared.jit import jit
from .._shared.vectors import SIDE, differ, largest_bits


@jit
def largest_row(W):
    """A row of W in which the largest |W_ij| stands, or an entry that is not finite if there is one."""
    row, most = 0, largest_bits(W[0])
    for i in range(1, W.shape[0]):
        size = largest_bits(W[i])
        if size > most:
            row, most = i, size
    return W[row]


@jit
def extremes(W, finite, largest, asymmetry):
    """Per instance: whether W is finite, and if so max |W_ij| and max |W_ij - W_ji| (in float64)."""
    n = W.shape[1]
    whole = n // SIDE * SIDE
    for b in range(W.shape[0]):
        here = W[b]
        row = largest_row(here)
        largest[b] = np.abs(row).max()
        finite[b] = np.isfinite(row).all()
        if not finite[b]:
            continue
        worst = 0.0
        for i in range(0, whole, SIDE):
            for j in range(0, i + 1, SIDE):
                if differ(here, i, j):
                    worst = max(worst, _largest_difference(here, i, i + SIDE, j, j + SIDE))
        asymmetry[b] = max(worst, _largest_difference(here, whole, n, 0, n))


@jit
def _largest_difference(W, top, bottom, left, right):
    worst = 0.0
    for i in range(top, bottom):
        for j in range(left, right):
            worst = max(worst, abs(np.float64(W[i, j]) - np.float64(W[j, i])))
    return worst


@jit
def objective(W, mask, value, size):
    """f of every instance by sums that keep what rounding takes off them, some 32 digits of `size`, the sum of |W_ij|.

    Down the columns, so that the inner loop is one of vectors (Knuth's exact addition: Ogita, Rump & Oishi, 2005).
    """
    n = W.shape[1]
    high, low, sizes = np.empty(n), np.empty(n), np.empty(n)
    for b in range(W.shape[0]):
        high[:], low[:], sizes[:] = 0.0, 0.0, 0.0
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


@jit
def indices(mask, found):
    """The True places of every row of `mask`, in order; what is left of `found` stays."""
    size, n = mask.shape
    places = np.empty(n + 1, np.int64)
    for b in range(size):
        count = 0
        for i in range(n):  # no branch, which would be guessed wrong half of the time
            places[count] = i
            count += np.int64(mask[b, i])
        for at in range(min(count, found.shape[1])):
            found[b, at] = places[at]
