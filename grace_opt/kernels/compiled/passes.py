"""Single passes over batches of W: what its checks need to know, and f in float64, without copies of W.

Source: ours. In torch the same takes a pass, and a temporary of W's size, for every operation.
"""

from __future__ import annotations

import numpy as np
from numba import njit

#: Side of the tiles in which W and its transpose are compared; two of them fit into the first-level cache.
TILE = 32


@njit(cache=True, nogil=True, fastmath={"nsz", "reassoc"})
def sizes(row):
    """max |w|, and 0.0 if every entry is finite, else NaN: infinity times 0 is NaN."""
    largest = total = row.dtype.type(0)
    for j in range(row.shape[0]):
        total += row[j] * row.dtype.type(0)
        largest = abs(row[j]) if abs(row[j]) > largest else largest
    return largest, total


@njit(cache=True, nogil=True)
def extremes(W, finite, largest, asymmetry):
    """Per instance: whether W is finite, and if so max |W_ij| and max |W_ij - W_ji| (in float64)."""
    n = W.shape[1]
    for b in range(W.shape[0]):
        finite[b], most = True, 0.0
        for i in range(n):
            size, zero = sizes(W[b, i])
            finite[b] &= zero == 0
            most = max(most, size)
        if not finite[b]:
            continue
        largest[b], worst = most, 0.0
        for above in range(0, n, TILE):
            for left in range(0, above + 1, TILE):
                for i in range(above, min(above + TILE, n)):
                    for j in range(left, min(left + TILE, i)):
                        if W[b, i, j] != W[b, j, i]:
                            worst = max(worst, abs(np.float64(W[b, i, j]) - np.float64(W[b, j, i])))
        asymmetry[b] = worst


@njit(cache=True, nogil=True)
def objective(W, mask, value):
    """f of every instance, summed in float64 row by row."""
    n = W.shape[1]
    chosen = np.empty(n, np.int64)
    for b in range(W.shape[0]):
        size = 0
        for i in range(n):
            if mask[b, i]:
                chosen[size] = i
                size += 1
        total = 0.0
        for p in range(size):
            row, part = W[b, chosen[p]], 0.0
            for q in range(size):
                part += np.float64(row[chosen[q]])
            total += part
        value[b] = total
