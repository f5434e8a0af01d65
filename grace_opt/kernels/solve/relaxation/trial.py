"""Check that the compiled relaxation's dual value is a bound and meets the relaxation's value."""

from __future__ import annotations

import numpy as np

from ..._shared.cases import least_of_all, small_instance

K = 4


def cpu() -> bool:
    """Check that the bound is below the least f of all subsets and equal to the value at its own x."""
    from .cpu import minimise, repair

    W = small_instance()
    shift = 1.0 - float(np.linalg.eigvalsh(W)[0])
    A, c = W + shift * np.eye(len(W)), np.full(len(W), -shift)
    x, gradient, ordered = np.zeros(len(W)), np.empty(len(W)), np.empty(len(W))
    repair(x, float(K))
    best, _, value = minimise(A, c, K, x, gradient, ordered, np.inf, 1e-9, 10_000)
    return bool(best <= least_of_all(W, K) and abs(value - best) <= 1e-6 * abs(value) and abs(x.sum() - K) <= 1e-9)
