"""Solvers that `bench.scales` asks beside those of `bench.solvers.peers`: SciPy's milp, and SDP solvers through cvxpy.

Each takes ``(W, k, limit, seed)`` and returns what those do. W is given to them as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.solvers.checks import Array
from bench.solvers.peers import Peer


def milp(W: Array, k: int, limit: float, seed: int) -> dict[str, Any]:
    """The linearised program (McCormick), by SciPy, which calls HiGHS with a gap of 0."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    n = len(W)
    i, j = np.nonzero(np.triu(W, 1))
    m, e = len(i), np.arange(len(i))
    negative = W[i, j] < 0
    one = np.ones
    # y ≤ x_i and y ≤ x_j for weights below 0, y ≥ x_i + x_j - 1 for those above, and k vertices.
    below, above = e[negative], e[~negative]
    parts = [
        (below, n + below, one(len(below))), (below, i[below], -one(len(below))),
        (m + below, n + below, one(len(below))), (m + below, j[below], -one(len(below))),
        (2 * m + above, n + above, -one(len(above))), (2 * m + above, i[above], one(len(above))),
        (2 * m + above, j[above], one(len(above))), (np.full(n, 3 * m), np.arange(n), one(n)),
    ]  # fmt: skip
    rows, columns, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    A = coo_array((values, (rows, columns)), shape=(3 * m + 1, n + m)).tocsr()
    low, high = np.full(3 * m + 1, -np.inf), np.concatenate([np.zeros(2 * m), np.ones(m), [float(k)]])
    low[-1] = k
    found = milp(
        np.concatenate([W.diagonal(), 2 * W[i, j]]),
        integrality=np.concatenate([np.ones(n), np.zeros(m)]),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(A, low, high),
        options={"time_limit": limit, "mip_rel_gap": 0.0},
    )
    if found.status not in (0, 1):
        return {"status": "failed", "message": found.message}
    chosen = None if found.x is None else np.flatnonzero(found.x[:n] > 0.5).tolist()
    return {"status": "proved" if found.status == 0 else "limit", "indices": chosen, "bound": found.mip_dual_bound}


def _relaxation(solver: str) -> Peer:
    """Shor's relaxation, whose value is below f of every set; as its solver states it, with its default tolerances."""

    def solve(W: Array, k: int, limit: float, seed: int) -> dict[str, Any]:
        import cvxpy as cp

        n = len(W)
        X = cp.Variable((n + 1, n + 1), PSD=True)
        x, Y = X[0, 1:], X[1:, 1:]
        constraints = [X[0, 0] == 1, cp.diag(Y) == x, cp.sum(x) == k, cp.sum(Y, axis=1) == k * x]
        problem = cp.Problem(cp.Minimize(cp.trace(W @ Y)), constraints)
        value = problem.solve(solver=solver.upper())
        solved = problem.status == "optimal"
        return {"status": "limit" if solved else "failed", "bound": float(value) if solved else None}

    return solve


SCALES_PEERS: dict[str, Peer] = {"milp": milp, "scs": _relaxation("scs"), "clarabel": _relaxation("clarabel")}
