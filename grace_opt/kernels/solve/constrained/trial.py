"""Check the compiled searches under constraints against enumeration."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._shared.cases import small_instance

K = 4


def cpu() -> bool:
    """Check that all find the least f of all subsets with one vertex each of two groups and costs in a budget."""
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
    exchanged = values.get(tuple(np.flatnonzero(search.chosen).tolist())) == value[0]
    return bool(enumerated and exchanged and _least_in_tree(W, A, rows) == value[0])


def _least_in_tree(W: npt.NDArray[np.float64], A: npt.NDArray[np.int64], rows: tuple[Any, ...]) -> float:
    """Return the least f that the tree search finds, paying half a unit for the first row."""
    from .cpu.search import search

    m, depth, shift = len(W), len(W) + 8, 1.0 - float(np.linalg.eigvalsh(W)[0])
    price = np.array([0.5, 0.0])
    relaxed, nothing = W + shift * np.eye(m), np.zeros((m, m))
    status, consts, bounds = np.zeros((depth, m), np.int8), np.zeros((depth, 3)), np.full(depth, -np.inf)
    X, C, E = np.full((depth, m), K / m), np.zeros((depth, m)), np.zeros((depth, m))
    C[0], consts[0] = price @ A, (-price.sum(), 0.0, K)
    chosen, order = np.zeros(m, np.bool_), np.argsort(A, axis=1, kind="stable")
    top, best, nodes, stack = 1, np.inf, 0, (W, relaxed, nothing, nothing, status, X, C, E, consts, bounds)
    entries, lower, upper, limbs, limit = rows
    while top and nodes < 10_000:
        more = entries, order, lower, upper, limbs, limit, price, np.ones(2, np.int64)
        top, used, found = search(*stack, top, best, chosen, 0.0, np.ones(m), 10_000, *more)
        best = min(best, float(W[np.ix_(chosen, chosen)].sum())) if found else best
        nodes += used
    return best if top == 0 else np.inf
