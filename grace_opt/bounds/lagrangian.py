r"""Bounds under linear rows: the relaxation pays for what breaks a row, at prices chosen to make its bound largest.

For multipliers :math:`\lambda`, with :math:`b_r` the upper bound of a row where :math:`\lambda_r > 0` and the lower one
where it is negative,

.. math:: \min_{|S| = k} f(S) + \lambda^\top (A x - b) \le \min \{ f(S) : |S| = k,\ l \le A x \le u \},

since the added term is at most 0 for every choice that keeps the rows. It is linear: a subproblem with other node
weights, to which every relaxation, and fixing by bounds, applies as it is. Of a pair that is never chosen together,
the weight is in no such choice, and may be anything: it is raised.

When: `branch_and_bound` and certificates, where there are constraints. Multipliers come from subgradient steps of
Polyak's length, at the plain relaxation; any would be valid. Complexity O(m²) per step, a relaxation each. Source:
Geoffrion, Mathematical Programming Study 2 (1974); Polyak, USSR Comput. Math. 9 (1969).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..problem import Problem
from ..problem.constraints import IntegerRows
from ..run import Run
from .convexity import start_diagonal
from .dnn import dnn_relaxation, seconds_per_dnn_step
from .fixing import reduce_by_fixing
from .qcr import seconds_to_relax, solve_relaxation, with_diagonal
from .subproblem import Array, Subproblem

#: Number of subgradient steps; a step's length is halved after so many without a better bound.
STEPS, PATIENCE = 60, 4
#: Relative accuracy of the relaxations between two steps.
RTOL = 1e-3
#: The weight of a pair that is never chosen is raised to this many times the mean size of weights.
RAISED = 2.0
#: A bound proves f if it is within this of it, relative to it; most vertices of which each is probed, and that get
#: products of pairs.
FIXING_RTOL, LARGEST_PROBED, LARGEST_PAIRED = 1e-10, 200, 100


@dataclass(frozen=True)
class Priced:
    """A subproblem that pays for rows.

    Attributes
    ----------
    sub : Subproblem
        Its f is at most the true one, in units of the given subproblem, for every choice that keeps the rows.
    multipliers : ndarray (r,)
    paid : ndarray (r,), int64
        The bounds of the rows that it pays to.
    """

    sub: Subproblem
    multipliers: Array
    paid: npt.NDArray[np.int64]


def priced(sub: Subproblem, rows: IntegerRows, incumbent: float, run: Any = None) -> Priced:
    """The subproblem with node weights that pay for the rows, for a bound that is as large as found.

    Parameters
    ----------
    sub : Subproblem
        With ``0 < k < m``, none of its vertices decided.
    rows : IntegerRows
        Over the instance's vertices.
    incumbent : float
        f of a choice that keeps the rows.
    run : Run, optional
        Steps end when its time is up.

    Examples
    --------
    >>> from grace_opt import Problem
    >>> from grace_opt.problem.constraints import constraints_of
    >>> sub, _ = Subproblem.of(Problem.of(np.diag([1.0, 1.5, 1.0, 1.25]), 2))
    >>> rows = constraints_of(4, groups=[*"abab"], counts={"a": (None, 1)}).integers
    >>> found = priced(sub, rows, 2.25)
    >>> round(float(solve_relaxation(sub).bound), 2), round(float(solve_relaxation(found.sub).bound), 2)
    (2.0, 2.25)
    """
    kept = rows.restricted(sub.chosen, sub.vertices)
    A, size = kept.A.astype(np.float64), np.maximum(np.abs(kept.A).max(1, initial=0), 1).astype(np.float64)
    A /= size[:, None]
    low, high = kept.lower / size, kept.upper / size
    plain = _without_pairs(sub, kept)
    diagonal = with_diagonal(plain.W, start_diagonal(plain, plain.W))
    best, least, prices, length, stale = np.zeros(len(A)), -np.inf, np.zeros(len(A)), 1.0, 0
    x = None
    for _ in range(STEPS):
        if run is not None and not run.has_time(seconds_to_relax(sub.m)):
            break
        found = solve_relaxation(_paying(plain, A, low, high, prices), diagonal, x=x, rtol=RTOL, run=run)
        x = found.x
        if found.bound > least:
            best, least, stale = prices, found.bound, 0
        else:
            stale += 1
            if stale >= PATIENCE:
                prices, length, stale = best, 0.5 * length, 0
        sums = A @ x
        excess = np.where(prices > 0, sums - high, np.where(prices < 0, sums - low, np.clip(sums, low, high)))
        excess = np.where(prices == 0, sums - excess, excess)
        squares = float(excess @ excess)
        gap = incumbent - found.bound
        if squares <= 1e-12 or gap <= 0 or length < 1e-3:
            break
        moved = prices + length * gap / squares * excess
        moved = np.where(prices * moved < 0, 0.0, moved)  # to the other bound only by way of 0
        prices = moved
    # Few digits: sums with them are then often exact.
    best = _rounded(best / size)
    paying = _paying(plain, kept.A.astype(np.float64), kept.lower.astype(float), kept.upper.astype(float), best)
    return Priced(paying, best, np.where(best >= 0, rows.upper, rows.lower))


def lagrangian_bound(problem: Problem, incumbent: Tensor, run: Run) -> Tensor:
    """A lower bound on f of every choice that keeps the constraints, (1,) float64; -inf if the incumbent does not.

    Parameters
    ----------
    problem : Problem
        A flattened batch of one instance, with constraints.
    incumbent : Tensor (1, n), bool
        A choice; f of the best one known makes the best bound.
    run : Run
        What does not fit into its time is left out.
    """
    value, nothing = problem.weights.objective(incumbent), torch.full_like(problem.k, -torch.inf, dtype=torch.float64)
    sub, scale = Subproblem.of(problem.instance(0), incumbent[0].cpu().numpy())
    rows = problem.constraints
    if rows is None or sub is None or sub.decided or rows.broken_by(incumbent):
        return nothing
    f = float(value[0]) / scale
    paying = priced(sub, rows.integers, f, run).sub
    slack = FIXING_RTOL * abs(f)
    left, bound = reduce_by_fixing(paying, f, slack, run, shifts=1, largest_probed=LARGEST_PROBED)
    if bound < f - slack and 0 < left.k < left.m <= LARGEST_PAIRED and run.has_time(seconds_per_dnn_step(left.m)):
        bound = max(bound, dnn_relaxation(left, f, run=run)[0].bound)
    bound = min(bound, f - slack) * scale  # choices of that f and more may have been left out
    return torch.minimum(value, torch.full_like(value, bound))


def _paying(sub: Subproblem, A: Array, low: Array, high: Array, prices: Array) -> Subproblem:
    """The subproblem with the term of these multipliers."""
    at = np.flatnonzero(prices)
    term, ends = prices[at, None] * A[at], prices[at] * np.where(prices[at] > 0, high[at], low[at])
    return replace(
        sub,
        linear=sub.linear + term.sum(0),
        constant=sub.constant - float(ends.sum()),
        linear_size=sub.linear_size + np.abs(term).sum(0),
        constant_size=sub.constant_size + float(np.abs(ends).sum()),
    )


def _without_pairs(sub: Subproblem, rows: IntegerRows) -> Subproblem:
    """The subproblem with greater weights of pairs that are never chosen together."""
    pairs = (rows.A != 0).sum(1) == 2
    pairs &= (rows.upper == 1) & (rows.A.sum(1) == 2) & (rows.A.max(1, initial=0) == 1)
    if not pairs.any() or sub.m < 2:
        return sub
    W, level = sub.W.copy(), RAISED * float(np.abs(sub.W).sum()) / (sub.m * (sub.m - 1))
    for row in rows.A[pairs]:
        i, j = np.flatnonzero(row)
        W[i, j] = W[j, i] = max(W[i, j], level)
    return replace(sub, W=W)


def _rounded(prices: Array) -> Array:
    """The same to 20 binary digits."""
    mantissa, exponent = np.frexp(prices)
    return np.ldexp(np.round(mantissa * 2.0**20) / 2.0**20, exponent)
