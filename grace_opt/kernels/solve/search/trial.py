"""Check the compiled tree search against enumeration."""

from __future__ import annotations

import numpy as np

from ..._shared.cases import least_of_all, small_instance

K = 4


def cpu() -> bool:
    """Check that it finds the least f of all subsets, and a choice with that f."""
    from .cpu import search

    W = small_instance()
    m, depth, shift = len(W), len(W) + 8, 1.0 - float(np.linalg.eigvalsh(W)[0])
    A, nothing = W + shift * np.eye(m), np.zeros((m, m))
    status, consts, bounds = np.zeros((depth, m), np.int8), np.zeros((depth, 3)), np.full(depth, -np.inf)
    X, C, E = np.full((depth, m), K / m), np.zeros((depth, m)), np.zeros((depth, m))
    consts[0] = 0.0, 0.0, K
    chosen, optimum = np.zeros(m, np.bool_), least_of_all(W, K)
    stack = W, A, nothing, nothing, status, X, C, E, consts, bounds
    top, best, nodes = 1, optimum + 100.0, 0
    while top and nodes < 10_000:  # a slice ends when a better set is found
        top, best, more, _ = search(*stack, top, best, chosen, 0.0, np.ones(m), 10_000)
        nodes += more
    return bool(best == optimum == W[np.ix_(chosen, chosen)].sum() and chosen.sum() == K and top == 0)
