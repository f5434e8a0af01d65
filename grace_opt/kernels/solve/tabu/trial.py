"""Check that the compiled tabu search finds a small optimum and keeps its sums accurate."""

from __future__ import annotations

import numpy as np

from ..._shared.cases import least_of_all, small_instance

K, ITERATIONS = 4, 500


def cpu() -> bool:
    """Check that it finds the least f of all subsets, and a choice with that f."""
    from . import cpu as compiled

    W = small_instance()
    n = len(W)
    x, sums, until = np.arange(n) < K, np.empty(n), np.zeros(n, np.int64)
    top, heavy = np.empty((2, n))
    compiled.row_maxima(W, top)
    grain = compiled.scales(W, heavy)
    values = np.full(4, np.inf)
    value, values[3] = compiled.fill_sums(W, x, sums)
    values[:3] = value
    best, elites = x.copy(), np.zeros((8, n), np.bool_)
    state, random = np.zeros(4, np.int64), np.ones(1, np.uint64)
    fixed = W, top, heavy, grain, K
    compiled.run(*fixed, x, sums, until, best, values, elites, np.zeros(8), state, random, ITERATIONS, 100, 1)
    return bool(values[1] == W[np.ix_(best, best)].sum() == least_of_all(W, K) and best.sum() == K)
