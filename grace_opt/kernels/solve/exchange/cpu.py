"""Best-exchange local search, one instance after the other: ``local_search`` on the CPU.

The change of f when i leaves and j enters is :math:`(W_{ii} - 2 s_i) + (W_{jj} + 2 s_j) - 2 W_{ij}`, in float64 and in
this order, :math:`s = W 1_S`. Among equal changes the first is taken, by leaving vertex, then by entering vertex. Sums
are updated in O(n), and recomputed every ``REFRESH`` exchanges and before the search stops because of a doubtful
exchange. `grace_opt.kernels.solve.exchange.rounding` says which exchanges are doubtful and why the search ends.

Source: Ghosh (1996), and any work on maximum diversity.
"""

from __future__ import annotations

import numpy as np
from numba import b1, f4, f8, i8, void

from ..._shared.inner import least_exchange
from ..._shared.jit import SMALL, inlined, jit
from .rounding import REFRESH


@jit(ahead=[void(i8, f8, f[:, :, ::1], b1[:, ::1], b1[:, ::1], i8[::1]) for f in (f4, f8)], small=SMALL)
def improve(steps, tolerance, W, mask, candidates, done):
    """Make up to `steps` exchanges per instance, in `mask`; `done` counts them, and does not change at a local optimum.

    W : (B, n, n) float32 or float64; mask, candidates : (B, n) bool
    tolerance : rounding of a change, relative to the sizes of its two vertices
    done : (B,) int64
    """
    n = W.shape[1]
    sums, size, enter = np.empty(n), np.empty(n), np.empty(n)
    for b in range(W.shape[0]):
        if steps == 0:
            continue
        _sum_afresh(W[b], mask[b], sums, size)
        age = 0
        for _ in range(steps):
            change, i, j = _best_exchange(W[b], mask[b], candidates[b], sums, size, 0.0, enter)
            sure = change + tolerance * (size[i] + size[j]) < 0.0
            if not sure and age > 0:
                _sum_afresh(W[b], mask[b], sums, size)
                age = 0
                change, i, j = _best_exchange(W[b], mask[b], candidates[b], sums, size, 0.0, enter)
                sure = change + tolerance * (size[i] + size[j]) < 0.0
            if not sure and change < 0.0:
                change, i, j = _best_exchange(W[b], mask[b], candidates[b], sums, size, tolerance, enter)
                sure = change < 0.0
            if not sure:
                break
            mask[b, i], mask[b, j] = False, True
            done[b] += 1
            age += 1
            if age == REFRESH:
                _sum_afresh(W[b], mask[b], sums, size)
                age = 0
                continue
            for v in range(n):
                more, less = np.float64(W[b, j, v]), np.float64(W[b, i, v])
                sums[v] += more - less
                size[v] += 2.0 * (abs(more) + abs(less))  # count a vertex that has left: its rounding error remains


@inlined
def _sum_afresh(W, mask, sums, size):
    n = len(sums)
    for v in range(n):
        sums[v] = 0.0
        size[v] = abs(np.float64(W[v, v]))
    for i in range(n):
        if mask[i]:
            for v in range(n):
                w = np.float64(W[i, v])
                sums[v] += w
                size[v] += 2.0 * abs(w)


@inlined
def _best_exchange(W, mask, candidates, sums, size, margin, enter):
    """Return the least change of f (infinite if no exchange is possible), the leaving and the entering vertex.

    Both ends cost `margin` times their size besides.
    """
    n = len(sums)
    for v in range(n):
        available = candidates[v] and not mask[v]
        enter[v] = (W[v, v] + 2.0 * sums[v]) + margin * size[v] if available else np.inf
    best, first = np.inf, -1
    for i in range(n):
        if mask[i]:
            change = least_exchange(W[i], enter, (W[i, i] - 2.0 * sums[i]) + margin * size[i])
            if change < best:
                best, first = change, i
    if first < 0:
        return best, -1, -1
    leave = (W[first, first] - 2.0 * sums[first]) + margin * size[first]
    for j in range(n):
        if (leave + enter[j]) - 2.0 * W[first, j] == best:
            return best, first, j
    return np.inf, -1, -1
