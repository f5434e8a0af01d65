"""Check the compiled searches under constraints against enumeration."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from ..._shared.cases import small_instance

K = 4


def cpu() -> bool:
    """Check that both find the least f of all subsets with one vertex each of two groups and costs in a budget."""
    from .cpu.enumeration import advance
    from .exchange import ConstrainedExchanges

    W = small_instance()
    n = len(W)
    A = np.array([[1, 1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0, 0]])
    lower, upper, limit = np.ones(2, np.int64), np.ones(2, np.int64), np.array([21, 0])
    limbs = np.stack([np.arange(n) + 1, np.zeros(n, np.int64)])
    feasible = [
        subset
        for subset in combinations(range(n), K)
        if (A[:, subset].sum(1) == 1).all() and limbs[0, subset].sum() <= 21
    ]
    values = {subset: float(W[np.ix_(subset, subset)].sum()) for subset in feasible}
    c, best, value = np.append(np.arange(K), n), np.zeros(K, np.int64), np.array([np.inf, 0.0])
    rows = np.ascontiguousarray(A.T), lower, upper, np.ascontiguousarray(limbs.T), limit
    seen, finished = advance(W, c, best, value, 10_000, *rows)
    enumerated = finished and seen == 126 and value[0] == min(values.values()) == values.get(tuple(best.tolist()))
    start = np.isin(np.arange(n), feasible[0])
    search = ConstrainedExchanges(W, start, np.ones(n, bool), np.arange(n), A, lower, upper, limbs, limit)
    while search.step():
        pass
    return bool(enumerated and values.get(tuple(np.flatnonzero(search.chosen).tolist())) == value[0])
