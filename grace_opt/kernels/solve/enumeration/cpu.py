"""Visit every k-subset in revolving-door order, updating f and the row sums from one to the next; compiled.

`exhaustive` runs it; its module explains why rounding cannot decide the result. Sources: Knuth, TAOCP 4A, 7.2.1.3,
Algorithm R; Ogita, Rump & Oishi (2005) for sums in pairs.
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i8, types

from ..._shared.jit import SMALL, inlined, jit

_EPS = float(np.finfo(np.float64).eps)


@jit(ahead=[types.Tuple((i8, b1))(f8[:, ::1], i8[::1], i8[::1], f8[::1], i8)], small=SMALL)
def advance(W, c, best, best_value, budget):
    """Visit up to `budget` subsets from `c` on; return how many, and whether these were the last.

    Parameters
    ----------
    W : (n, n) float64
    c : (k + 1,) int64
        The current subset, ascending, and n; moved on.
    best : (k,) int64, best_value : (2,) float64
        The best subset, and its f as a pair; updated.
    budget : int
    """
    n, k = W.shape[0], c.shape[0] - 1
    sums, errors = np.empty(n), np.empty(n)  # W 1_S, and an error bound for each
    value, error = _afresh(W, c, sums, errors)
    for seen in range(budget):
        if not value - error > best_value[0]:
            high, low = pair_sum(W, c[:k])
            if high < best_value[0] or (high == best_value[0] and low < best_value[1]):
                best_value[0], best_value[1] = high, low
                for a in range(k):
                    best[a] = c[a]
            elif high > best_value[0]:  # a false alarm
                value, error = _afresh(W, c, sums, errors)
        out, new = next_subset(c)
        if new < 0:
            return seen + 1, True
        change = W[out, out] - 2.0 * sums[out] + W[new, new] + 2.0 * (sums[new] - W[out, new])
        size = abs(W[out, out]) + 2.0 * abs(sums[out]) + abs(W[new, new]) + 2.0 * (abs(sums[new]) + abs(W[out, new]))
        value += change
        error += 2.0 * (errors[out] + errors[new]) + 8.0 * _EPS * (size + abs(value))
        for j in range(n):
            sums[j] += W[new, j] - W[out, j]
            errors[j] += 2.0 * _EPS * (abs(sums[j]) + abs(W[new, j]) + abs(W[out, j]))
    return budget, False


@inlined
def pair_sum(W, subset):
    """Return f of a subset as a pair, high and low, of which the first is f rounded once."""
    total, lost = 0.0, 0.0
    for i in subset:
        for j in subset:
            after = total + W[i, j]
            part = after - total
            lost += (total - (after - part)) + (W[i, j] - part)
            total = after
    high = total + lost
    return high, lost - (high - total)


@inlined
def _afresh(W, c, sums, errors):
    """Compute f of the current subset and a bound on its error; `sums` and `errors` too."""
    n, k = W.shape[0], c.shape[0] - 1
    for j in range(n):
        total, size = 0.0, 0.0
        for a in range(k):
            total += W[c[a], j]
            size += abs(W[c[a], j])
        sums[j], errors[j] = total, 2.0 * k * _EPS * size
    high, _ = pair_sum(W, c[:k])
    size = 0.0
    for a in range(k):
        size += errors[c[a]]
    return high, 2.0 * _EPS * (abs(high) + size)


@inlined
def next_subset(c):
    """Return, by algorithm R with 0-based positions, the exchange that leads to the next subset, ``out`` for ``new``;
    -1 at the end."""
    k = c.shape[0] - 1
    out, new = -1, -1
    j = 1
    decrease = True
    if k % 2 == 1:
        if c[0] + 1 < c[1]:
            out, new = c[0], c[0] + 1
            c[0] = new
    elif c[0] > 0:
        out, new = c[0], c[0] - 1
        c[0] = new
    else:
        decrease = False
    while new < 0 and j < k:
        if decrease:
            if c[j] >= j + 1:
                out, new = c[j], j - 1
                c[j] = c[j - 1]
                c[j - 1] = new
                break
            j += 1
        else:
            if c[j] + 1 < c[j + 1]:
                out, new = c[j - 1], c[j] + 1
                c[j - 1] = c[j]
                c[j] = new
                break
            j += 1
        decrease = not decrease
    return out, new
