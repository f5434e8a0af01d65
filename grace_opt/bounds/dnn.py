r"""First-order multipliers for the doubly nonnegative relaxation with all products of pairs (DNN + RLT).

With :math:`\bar x = 1 - x` and :math:`y = (x, \bar x)`, the relaxation asks for :math:`Y \approx yy^\top` positive
semidefinite, entrywise nonnegative, with :math:`x_i \bar x_i = 0` and on the face that ``1ᵀx = k`` cuts out: then ``Y =
V R Vᵀ`` with R only m×m and trace R = m. The alternating direction method of multipliers splits it into the two
projections: eigenvalues onto a simplex, and entries onto [0, 1]. The result is multipliers of :math:`x_i x_j \ge 0`,
:math:`x_i (1 - x_j) \ge 0` and :math:`(1 - x_i)(1 - x_j) \ge 0`. Any nonnegative ones give a valid bound, which
`dnn_relaxation` proves independently; stopping early makes it looser, never wrong.

Sources: Burer (2010) and Oliveira, Wolkowicz & Xu (2018) for the facially reduced splitting; Sherali & Adams (1990) for
the products. New here is the complement block, which turns all products into plain nonnegativity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .qcr import SECONDS_PER_CUBE, QuadraticRelaxation, qcr_relaxation
from .subproblem import Array, Subproblem

#: Over-relaxation of the multiplier step; anything below 1.618 converges.
RELAXATION = 1.6
#: The penalty is checked after this many steps, and changed by this factor if the residuals differ by this ratio.
BALANCE_EVERY, IMBALANCE, CHANGE = 20, 4.0, 1.5
#: A warm start from multipliers larger than this times the weights is refused.
OUTGROWN = 1e6
#: Times m³: approximate seconds per step on one core.
SECONDS_PER_DNN_STEP = 8e-10
#: Default number of steps after a cold and after a warm start.
COLD_STEPS, WARM_STEPS = 150, 60


@dataclass
class DnnMultipliers:
    """State of the method: the blocks of Y and of the multiplier Z (x entries, mixed entries, complement entries)."""

    Y: tuple[Array, Array, Array]
    Z: tuple[Array, Array, Array]
    penalty: float = 1.0

    @classmethod
    def cold(cls, sub: Subproblem) -> DnnMultipliers:
        """The start: a uniform point and no multipliers."""
        m, k = sub.m, sub.k
        pairs = m * max(m - 1, 1)
        shares = k * (k - 1) / pairs, k * (m - k) / pairs, (m - k) * (m - k - 1) / pairs
        X, M, N = (np.full((m, m), share) for share in shares)
        np.fill_diagonal(X, k / m)
        np.fill_diagonal(M, 0.0)
        np.fill_diagonal(N, 1 - k / m)
        zero = np.zeros((m, m))
        return cls((X, M, N), (zero, zero.copy(), zero.copy()))

    def restricted(self, free: Any) -> DnnMultipliers:
        """The blocks of the `free` vertices."""
        at = np.ix_(free, free)
        X, M, N = (block[at] for block in self.Y)
        return DnnMultipliers((X, M, N), tuple(block[at] for block in self.Z), self.penalty)  # type: ignore[arg-type]


def dnn_relaxation(
    sub: Subproblem, incumbent: float, warm: DnnMultipliers | None = None, *, steps: int | None = None, run: Any = None
) -> tuple[QuadraticRelaxation, DnnMultipliers]:
    """A relaxation with products of pairs subtracted, and multipliers from which to start a smaller subproblem.

    Parameters
    ----------
    sub : Subproblem
        With ``0 < k < m``.
    incumbent : float
        Objective of a known choice.
    warm : DnnMultipliers, optional
        Of the same vertices; from a subproblem that contained them.
    steps : int, optional
        Steps of the method; default 150 cold, 60 warm.
    run : Run, optional
        Stops early when its time is over; the bound holds all the same.

    Notes
    -----
    O(m³) per step: one symmetric eigenvalue problem and one product of m×m matrices.
    """
    full = sub.W + np.diag(sub.linear)
    size = max(float(np.linalg.norm(full)) / sub.m, float(np.finfo(np.float64).tiny))
    if warm is not None and max(float(np.abs(block).max()) for block in warm.Z) > OUTGROWN * size:
        warm = None  # the remaining weights are far smaller: the parent's multipliers would swamp them
    count = steps if steps is not None else COLD_STEPS if warm is None else WARM_STEPS
    state = DnnMultipliers.cold(sub) if warm is None else warm
    state = _iterate(full / size, sub.k, DnnMultipliers(state.Y, _scaled(state.Z, 1 / size), state.penalty), count, run)
    state = DnnMultipliers(state.Y, _scaled(state.Z, size), state.penalty)
    X, M, N = state.Z
    off = 1.0 - np.eye(sub.m)
    both = np.maximum(0.5 * (sub.W + X + (sub.W + X).T), 0.0) * off
    one = np.maximum(M, 0.0) * off
    none = np.maximum(0.5 * (N + N.T), 0.0) * off
    A = sub.W - both + one + one.T - none
    cuts = A, 2.0 * (none - one).T.copy(), none
    start = 2.0 * M.diagonal() - X.diagonal() - N.diagonal()
    return qcr_relaxation(sub, incumbent, cuts=cuts, start=start, weights=(0.004, 0.001), run=run), state


def seconds_per_dnn_step(m: int) -> float:
    """Approximate seconds of a step, plus the relaxation after the last one, for m vertices on one core."""
    return (SECONDS_PER_DNN_STEP + 2 * SECONDS_PER_CUBE) * float(m**3)


def _scaled(blocks: tuple[Array, Array, Array], factor: float) -> tuple[Array, Array, Array]:
    X, M, N = blocks
    return X * factor, M * factor, N * factor


def _iterate(C: Array, k: int, state: DnnMultipliers, steps: int, run: Any) -> DnnMultipliers:
    """The method itself, on weights C (node weights on the diagonal) of size about one."""
    m = len(C)
    p, q = k / m, 1 - k / m
    norm2 = m * (p * p + q * q)
    cross = math.sqrt(2 * norm2)
    h = np.ones(m)
    h[0] += math.sqrt(m)
    h *= math.sqrt(2) / np.linalg.norm(h)  # the reflection I - hhᵀ takes the all-ones direction to the first axis
    # The blocks of each lie in one array: for a dozen vertices, the calls cost more than what they compute.
    Y, Z, b = np.stack(state.Y), np.stack(state.Z), state.penalty
    P, reduced, seconds = np.empty_like(Y), np.empty((m, m)), seconds_per_dnn_step(m)
    for step in range(1, steps + 1):
        # Vᵀ T V for T = Y + Z / b, block by block
        T = Y + Z / b
        TX, TM, TN = T
        reduced[1:, 1:] = 0.5 * _reflected(TX - TM - TM.T + TN, h)[1:, 1:]
        (x, mixed, n), (rows_x, rows_m, rows_n) = np.add.reduce(T, (1, 2)).tolist(), np.add.reduce(T, 2)
        reduced[0, 0] = (p * p * x + 2 * p * q * mixed + q * q * n) / norm2
        edge = p * (rows_x - np.add.reduce(TM, 0)) + q * (rows_m - rows_n)
        reduced[0, 1:] = reduced[1:, 0] = (edge - h * (h @ edge))[1:] / cross
        try:
            values, vectors = np.linalg.eigh(reduced)
        except np.linalg.LinAlgError:  # entries too far apart: the current multipliers are still valid
            break
        weights = _onto_simplex(values, float(m))
        alive = weights > 0
        factor = vectors[:, alive] * np.sqrt(weights[alive])
        R = factor @ factor.T
        # V R Vᵀ, block by block
        level, tilt = float(R[0, 0]) / norm2, R[:, 0].copy()
        tilt[0] = R[0] = R[:, 0] = 0.0
        bend = 0.5 * _reflected(R, h)
        tilt = (tilt - h * (h @ tilt)) / cross
        row, column = tilt[:, None], tilt[None, :]
        both = row + column
        P[0] = bend + p * p * level + p * both
        P[1] = p * q * level - bend + q * row - p * column
        P[2] = bend + q * q * level - q * both
        last, back = Y, Z.copy()
        back[0] += C
        back /= b
        Y = P - back
        Y.clip(0.0, 1.0, out=Y)
        np.fill_diagonal(Y[1], 0.0)
        Z += RELAXATION * b * (Y - P)
        if step % BALANCE_EVERY == 0:
            primal, dual = _distance(Y, P), b * _distance(Y, last)
            if primal > IMBALANCE * dual:
                b *= CHANGE
            elif dual > IMBALANCE * primal:
                b /= CHANGE
        if run is not None and not run.has_time(seconds):
            break
    (X, M, N), (ZX, ZM, ZN) = Y, Z
    return DnnMultipliers((X, M, N), (ZX, ZM, ZN), b)


def _reflected(S: Array, h: Array) -> Array:
    """(I - hhᵀ) S (I - hhᵀ) for symmetric S."""
    Sh = S @ h
    return np.asarray(S - Sh[:, None] * h - h[:, None] * (Sh - (h @ Sh) * h))


def _onto_simplex(values: Array, total: float) -> Array:
    """The nearest point to ascending `values` with nonnegative entries of sum `total`."""
    down = values[::-1]
    excess = (np.add.accumulate(down) - total) / np.arange(1, len(values) + 1)
    last = (down > excess).nonzero()[0][-1]
    return np.asarray(np.maximum(values - excess[last], 0.0))


def _distance(a: Array, b: Array) -> float:
    x, m, n = (float(np.linalg.norm(u - v)) for u, v in zip(a, b, strict=True))
    return math.sqrt(x * x + 2 * m * m + n * n)
