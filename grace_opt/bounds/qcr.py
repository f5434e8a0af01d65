r"""Convex relaxations of a subproblem, tightened by a diagonal and by products of pairs, with valid bounds.

For 0/1 points with k ones,

.. math:: x^\top W x + l^\top x = x^\top A x + (l - \mathrm{diag} A + E)^\top x + h + (\text{something} \ge 0),

where A is convex on :math:`1^\perp`. Its diagonal comes from `qcr_relaxation` (QCR by coordinate ascent); off the
diagonal it differs from W by multiples of :math:`x_i x_j`, :math:`x_i (1 - x_j)` and :math:`(1 - x_i)(1 - x_j)`, all
of them :math:`\ge 0`, that were subtracted (`grace_opt.bounds.dnn.dnn_relaxation`).

An eigenvalue computation checks that A is convex, and the diagonal is shifted if it is not; `rounding` bounds the error
of evaluating a bound. Sources: Billionnet, Elloumi & Plateau (2009); Billionnet, Elloumi & Lambert (2012); Rendl,
Rinaldi & Wiegele (2010) for bounds of this strength in branch and bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.arrays import least_eigenvalue
from ..run import Run
from .convexity import CHOLESKY_FROM, NOTHING, PLANE_PENALTY, made_convex, penalise_leaving, start_diagonal
from .subproblem import Array, Subproblem

#: With more vertices than this, a single relaxation takes minutes and gigabytes.
LARGEST_RELAXED = 2000
#: Relative accuracy of the relaxations' solutions; number of steps allowed per vertex, or in all if that is more: few
#: vertices may need many. Gradients are computed anew after `STEPS_PER_VERTEX` m steps or fewer.
RTOL, STEPS_PER_VERTEX, STEPS_ALLOWED = 1e-6, 100, 10_000
#: Maximum number of sweeps per round of the ascent; share of the gap that a round must close to start another.
SWEEPS, WORTH_ANOTHER_ROUND = 6, 0.02
#: The diagonal has converged if a sweep changes no entry by more than this, in its own scale.
SETTLED = 1e-2
#: Approximate seconds on one core: times m³ for a relaxation that is small or has a diagonal that needs eigenvalues,
#: and for a sweep of the ascent; times m² for a large relaxation with a simple diagonal, growing with m.
SECONDS_PER_CUBE, SECONDS_PER_SWEEP, SECONDS_PER_SQUARE = 6e-10, 1e-9, 2e-7
#: Number of entries that the ascent changes, and that the steps of a relaxation read, between two looks at the clock.
ASCENT_SLICE, STEPS_SLICE = 50_000_000, 10_000_000
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class QuadraticRelaxation:
    """A convex relaxation with its solution.

    Attributes
    ----------
    A : ndarray (m, m)
        Convex on the plane.
    F, H : ndarray (m, m)
        A pair of free vertices adds ``F[i, j]`` to the linear term of j, and ``-H[i, j]`` to the constant.
    x : ndarray (m,)
        The (approximate) minimiser.
    bound : float
        A valid lower bound on the subproblem, less rounding.
    rounding : float
        Largest rounding error of a bound evaluated with these matrices.
    """

    A: Array
    F: Array
    H: Array
    x: Array
    bound: float
    rounding: float

    def restricted(self, sub: Subproblem, free: npt.NDArray[np.bool_]) -> QuadraticRelaxation:
        """The relaxation of the `free` vertices, which are those of `sub`; the bound stays valid."""
        A, F, H = (np.ascontiguousarray(M[np.ix_(free, free)]) for M in (self.A, self.F, self.H))
        return QuadraticRelaxation(A, F, H, self.x[free], self.bound, rounding_of(sub, A, F, H))

    @property
    def pairs(self) -> float:
        """Constant that the pair terms add while all vertices are free."""
        return 0.0 if _is_no_pairs(self.H) else -float(self.H.sum())


def solve_relaxation(
    sub: Subproblem,
    A: Array | None = None,
    F: Array | None = None,
    H: Array | None = None,
    x: Array | None = None,
    *,
    rtol: float = RTOL,
    run: Run | None = None,
) -> QuadraticRelaxation:
    """Solve the relaxation given by A, F and H, or the plain one (`start_diagonal`). Requires ``0 < k < m``.

    Ends when the time of `run` is up; the bound holds all the same.
    """
    from ..kernels.solve.relaxation.cpu import minimise, repair

    m = sub.m
    A = with_diagonal(sub.W, start_diagonal(sub, sub.W)) if A is None else A
    F, H = (np.broadcast_to(0.0, (m, m)) if M is None else M for M in (F, H))
    start = np.full(m, sub.k / m) if x is None else x.copy()
    repair(start, float(sub.k))
    c = linear_term(sub, A, F)
    gradient, ordered = np.empty(m), np.empty(m)
    best, before, slice_ = -np.inf, np.inf, min(max(1, STEPS_SLICE // m), STEPS_PER_VERTEX * m)
    allowed = max(STEPS_PER_VERTEX * m, STEPS_ALLOWED)
    for done in range(0, allowed, slice_):
        steps = min(slice_, allowed - done)
        bound, last, value = minimise(A, c, sub.k, start, gradient, ordered, np.inf, rtol, steps)
        best = max(best, bound)
        if value - last <= rtol * abs(value) or value >= before or (run is not None and run.expired()):
            break
        before = value
    rounding = rounding_of(sub, A, F, H)
    pairs = 0.0 if _is_no_pairs(H) else float(H.sum())
    return QuadraticRelaxation(A, F, H, start, best + sub.constant - pairs - rounding, rounding)


def seconds_to_relax(m: int) -> float:
    """Approximate seconds of `solve_relaxation` for m vertices on one core; used to skip what does not fit."""
    return SECONDS_PER_CUBE * float(m**3) if m < CHOLESKY_FROM else SECONDS_PER_SQUARE * float(m**2) * (1 + m / 3000)


def with_diagonal(W: Array, a: Array) -> Array:
    """W with a added to its diagonal."""
    A = W.copy()
    np.einsum("ii->i", A)[:] += a
    return A


def linear_term(sub: Subproblem, A: Array, F: Array) -> Array:
    """c of the relaxation while all vertices are free."""
    linear = sub.linear - A.diagonal()
    return linear if _is_no_pairs(F) else linear + F.sum(0)


def _is_no_pairs(M: Array) -> bool:
    """Whether F or H is a zero that takes no memory, as `solve_relaxation` puts it where there are none."""
    return M.strides == (0, 0)


def rounding_of(sub: Subproblem, A: Array, F: Array, H: Array) -> float:
    """Largest rounding error of a bound: sums of m terms, and gradients updated in up to `STEPS_PER_VERTEX` m steps."""
    if not sub.m:
        return 0.0
    from ..kernels.solve.relaxation.cpu import add_sizes

    rows = sub.linear_size.copy()
    largest = float(add_sizes(A, rows))
    add_sizes(sub.W, rows)
    H_sum = 0.0
    if not _is_no_pairs(F):
        add_sizes(F, rows)
        H_sum = float(np.abs(H).sum())
    terms = sub.k * float(rows.max()) + H_sum + sub.constant_size
    return 8.0 * sub.m * _EPS * terms + 4.0 * STEPS_PER_VERTEX * sub.m * sub.k * _EPS * largest


def qcr_relaxation(
    sub: Subproblem,
    incumbent: float,
    *,
    cuts: tuple[Array, Array, Array] | None = None,
    start: Array | None = None,
    plain: QuadraticRelaxation | None = None,
    weights: tuple[float, ...] = (0.02, 0.02, 0.004, 0.004, 0.001, 0.001),
    run: Any = None,
) -> QuadraticRelaxation:
    r"""The tightest relaxation found by coordinate ascent on the diagonal (QCR-CD).

    Parameters
    ----------
    sub : Subproblem
        With ``0 < k < m``.
    incumbent : float
        Objective of a known choice; scales the barrier.
    cuts : (A, F, H), optional
        W with products of pairs subtracted (zero diagonal), instead of W itself.
    start : ndarray (m,), optional
        Diagonal to start from; it is made valid first.
    plain : QuadraticRelaxation, optional
        What `solve_relaxation` gives for `sub`, if known; without cuts.
    weights : tuple of float
        Barrier weights, relative to gap / m, one round of ascent for each.
    run : Run, optional
        Rounds stop when its time is up.

    Notes
    -----
    O(m³) per sweep of the ascent, up to `SWEEPS` of them a round.
    """
    m = sub.m
    W, F, H = (sub.W, None, None) if cuts is None else cuts
    a = start_diagonal(sub, W) if plain is None else plain.A.diagonal()
    best = solve_relaxation(sub, with_diagonal(W, a), F, H, run=run) if plain is None else plain
    if start is not None:
        a2 = made_convex(W, start, np.ones(m))
        other = solve_relaxation(sub, with_diagonal(W, a2), F, H, run=run)
        if other.bound > best.bound:
            a, best = a2, other
    if not W.any():  # linear already
        return best
    # Entries may be negative, since convexity is needed on the plane only; the scale must be positive.
    scale = np.sqrt(np.maximum(a, 1e-9 * float(np.abs(a).max()) + NOTHING))
    base, e = W / np.outer(scale, scale), a / scale**2
    penalise_leaving(base, scale, PLANE_PENALTY)
    spread = np.maximum(best.x * (1 - best.x), 2e-3)
    for round_, weight in enumerate(weights):
        if run is not None and not run.has_time((3 * SECONDS_PER_CUBE + SECONDS_PER_SWEEP) * m**3):
            break
        gap = max(incumbent - best.bound, 1e-3 * abs(incumbent), NOTHING)
        least = least_eigenvalue(with_diagonal(base, e))
        e += max(0.0, 1e-8 - least)
        try:
            inverse = np.linalg.inv(with_diagonal(base, e))
        except np.linalg.LinAlgError:  # entries too far apart: keep the best so far
            break
        inverse = 0.5 * (inverse + inverse.T)
        for _ in range(SWEEPS):
            if not _swept(inverse, e, spread * scale**2, weight * gap / m, run):
                break
        if not np.isfinite(e).all():  # the inverse is too inaccurate to continue
            break
        a = made_convex(W, e * scale**2, scale)
        found = solve_relaxation(sub, with_diagonal(W, a), F, H, best.x, run=run)
        spread = 0.5 * spread + 0.5 * np.maximum(found.x * (1 - found.x), 2e-3)
        gain = found.bound - best.bound
        if gain > 0:
            best = found
        if best.bound >= incumbent or (round_ >= 2 and gain < WORTH_ANOTHER_ROUND * gap):
            break
    return best


def _swept(inverse: Array, e: Array, spread: Array, mu: float, run: Any) -> bool:
    """One sweep of the ascent, leaving time for its relaxation; returns whether another sweep is worthwhile."""
    from ..kernels.solve.shift.cpu import ascend

    m, largest = len(e), 0.0
    rows = max(1, ASCENT_SLICE // (m * m))
    for first in range(0, m, rows):
        change = ascend(inverse, e, spread, mu, first, min(m, first + rows))
        largest = max(largest, change)
        if change < 0 or (run is not None and not run.has_time(2 * SECONDS_PER_CUBE * m**3)):
            return False
    return largest >= SETTLED
