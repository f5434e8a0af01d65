"""Best-exchange local search, one instance after the other: what ``local_search`` does on the CPU.

The change of f when i leaves and j enters is :math:`(W_{ii} - 2 s_i) + (W_{jj} + 2 s_j) - 2 W_{ij}`, in float64 and in
this order, :math:`s = W 1_S`. Of equal changes the first is taken, by the vertex that leaves, then by the one that
enters. Sums are updated in O(n) and computed afresh every ``REFRESH`` exchanges, and before a stop is believed.

Source: Ghosh (1996), and any work on maximum diversity.
"""

from __future__ import annotations

import numpy as np

from ._jit import jit
from .passes import largest_row
from .vectors import least_exchange

#: Exchanges between two fresh computations of the sums, which keep their drift below the tolerance.
REFRESH = 256


@jit
def improve(steps, tolerance, W, mask, candidates, done):
    """Up to `steps` exchanges per instance, in `mask`; `done` counts them, and is as it was at a local optimum.

    W : (B, n, n) float32 or float64; mask, candidates : (B, n) bool
    tolerance : improvements up to this, relative to max |W|, are rounding
    done : (B,) int64
    """
    n = W.shape[1]
    sums, enter = np.empty(n), np.empty(n)
    for b in range(W.shape[0]):
        if steps == 0:
            continue
        _fresh_sums(W[b], mask[b], sums)
        rounding = tolerance * np.float64(np.abs(largest_row(W[b])).max())
        age = 0
        for _ in range(steps):
            change, i, j = _best_exchange(W[b], mask[b], candidates[b], sums, enter)
            if not change < -rounding and age > 0:
                _fresh_sums(W[b], mask[b], sums)
                age = 0
                change, i, j = _best_exchange(W[b], mask[b], candidates[b], sums, enter)
            if not change < -rounding:
                break
            mask[b, i], mask[b, j] = False, True
            done[b] += 1
            age += 1
            if age == REFRESH:
                _fresh_sums(W[b], mask[b], sums)
                age = 0
                continue
            for v in range(n):
                sums[v] += np.float64(W[b, j, v]) - np.float64(W[b, i, v])


@jit
def _fresh_sums(W, mask, sums):
    sums[:] = 0.0
    for i in range(len(sums)):
        if mask[i]:
            for v in range(len(sums)):
                sums[v] += W[i, v]


@jit
def _best_exchange(W, mask, candidates, sums, enter):
    """The least change of f, which vertex leaves, and which enters; infinite where no exchange is possible."""
    n = len(sums)
    for v in range(n):
        available = candidates[v] and not mask[v]
        enter[v] = W[v, v] + 2.0 * sums[v] if available else np.inf
    best, first = np.inf, -1
    for i in range(n):
        if mask[i]:
            change = least_exchange(W[i], enter, W[i, i] - 2.0 * sums[i])
            if change < best:
                best, first = change, i
    if first < 0:
        return best, -1, -1
    leave = W[first, first] - 2.0 * sums[first]
    for j in range(n):
        if (leave + enter[j]) - 2.0 * W[first, j] == best:
            return best, first, j
    return np.inf, -1, -1
