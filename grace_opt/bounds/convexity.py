r"""Diagonals that make a quadratic form convex on the plane ``sum x = k``, certified in spite of rounding.

For a few hundred vertices the least eigenvalue is computed, with a margin for LAPACK's rounding. For more, Lanczos
guesses it and a Cholesky factorisation proves the guess: if the factorisation of ``C + tI`` completes in floating
point, then :math:`\lambda_{\min}(C) \ge -t - \gamma_{m+1}\,\mathrm{tr}(C + tI)`, whatever the order of summation. This
is a theorem, and takes a tenth of the work of computing all eigenvalues. Sources: Lanczos (1950), by ARPACK; Demmel
(1989) and Rump, BIT 46 (2006), for the proof by Cholesky.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import numpy as np

from .._util.arrays import least_eigenvalue
from .subproblem import Array, Subproblem

#: Computed extreme eigenvalues are off by at most this times m·eps·‖·‖_F.
EIGENVALUE_MARGIN = 8.0
#: A completed Cholesky factorisation is that of a matrix off by at most (this + m)·eps·trace; half would do.
CHOLESKY_MARGIN = 8.0
#: From this many vertices on, Lanczos and Cholesky are faster than computing all eigenvalues.
CHOLESKY_FROM = 200
#: Relative accuracy of Lanczos' guess, size of its basis, factor of its error after each failure, number of guesses.
LANCZOS_RTOL, LANCZOS_BASIS, LOWER_BY, GUESSES = 1e-5, 60, 8.0, 6
#: A guess is rounded to this share of its error.
ROUNDED_TO = 1 / 16
#: Weight of the direction that leaves the plane ``sum x = k``, in unit-diagonal scale.
PLANE_PENALTY = 10.0
#: If a diagonal exceeds the node weights by less than this share of them, W counts as semidefinite.
SEMIDEFINITE_RTOL = 1e-6
#: Keeps scales away from the limits of float64; where this matters, W is of size about one.
NOTHING = 1e-100
_EPS = float(np.finfo(np.float64).eps)


def convex_shift(C: Array) -> float:
    """A number t for which ``C + tI`` is proved positive semidefinite, not much larger than necessary.

    Parameters
    ----------
    C : (m, m) float64 array, symmetric

    Notes
    -----
    O(m³): all eigenvalues, or a Cholesky factorisation and some 60 products with a vector.

    Examples
    --------
    >>> round(convex_shift(np.array([[2.0, 1.0], [1.0, 2.0]])), 6)
    -1.0
    """
    m = len(C)
    if m >= CHOLESKY_FROM and (found := _proved_by_cholesky(C)) is not None:
        return found
    with np.errstate(over="ignore"):  # infinite where its square is: then nothing is proved
        size = float(np.linalg.norm(C))
    return EIGENVALUE_MARGIN * m * _EPS * size - least_eigenvalue(C)


def _proved_by_cholesky(C: Array) -> float | None:
    """`convex_shift` from a Lanczos guess, or None if Lanczos or all guesses failed."""
    guess, error = _lanczos(C)
    if guess is None:
        return None
    if abs(guess) <= error:  # apparently singular: try a shift by no more than rounding first
        rounding = CHOLESKY_MARGIN * len(C) * _EPS * float(np.abs(C.diagonal()).sum())
        if (found := _shift_if_convex(C, rounding)) is not None:
            return found
    for _ in range(GUESSES):
        if (found := _shift_if_convex(C, error - guess)) is not None:
            return found
        error *= LOWER_BY
    return None


def _lanczos(C: Array) -> tuple[float | None, float]:
    """A guess at the least eigenvalue of C, and its approximate error.

    Both are rounded, since the last digits of products of BLAS depend on where in memory C lies.
    """
    arpack = importlib.import_module("scipy.sparse.linalg")
    m, middle = len(C), float(np.median(C.diagonal()))  # the accuracy is relative to the distance from it
    moved = arpack.LinearOperator((m, m), matvec=lambda x: C @ x - middle * x, dtype=np.float64)
    start = np.cos(np.arange(1.0, m + 1.0))  # an arbitrary vector
    try:
        (least,) = arpack.eigsh(
            moved, k=1, which="SA", tol=LANCZOS_RTOL, ncv=LANCZOS_BASIS, v0=start, return_eigenvectors=False
        )
    except arpack.ArpackError:  # no convergence included
        return None, 0.0
    if not np.isfinite(least):
        return None, 0.0
    guess, error = float(least) + middle, 2.0 * LANCZOS_RTOL * abs(float(least))
    step = 2.0 ** math.floor(math.log2(max(error, NOTHING))) * ROUNDED_TO
    return math.floor(guess / step) * step, math.ceil(error / step) * step


def _shift_if_convex(C: Array, t: float) -> float | None:
    """t plus the margin with which ``C + tI`` is proved positive semidefinite; None if the proof fails."""
    from scipy.linalg.lapack import dpotrf

    shifted = np.array(C, order="F")
    shifted[range(len(C)), range(len(C))] += t
    trace = float(shifted.diagonal().sum())
    _, failed = dpotrf(shifted, lower=1, clean=0, overwrite_a=1)
    # Half of the margin is the theorem's; the rest covers rounding of the diagonal, the trace and the sum.
    return None if failed or not np.isfinite(trace) else t + (len(C) + CHOLESKY_MARGIN) * _EPS * trace


def made_convex(W: Array, a: Array, scale: Array, penalty: float = PLANE_PENALTY) -> Array:
    """a plus the multiple of scale² that makes ``W + Diag a`` convex on the plane, rounding included.

    Without a penalty for leaving the plane it is convex everywhere.
    """
    from ..kernels.solve.relaxation.cpu import scaled_form

    scale, C = np.where(scale > 0, scale, 1.0), np.empty_like(W)
    size, rows = scaled_form(W, a, scale, C)
    weight = penalty * (1.0 + (rows if len(C) < CHOLESKY_FROM else 2.0 * size / len(C) ** 0.5))
    penalise_leaving(C, scale, weight)
    rounding = EIGENVALUE_MARGIN * _EPS * (size + weight)  # of C's entries, as scaled and summed
    return np.asarray(a + (convex_shift(C) + rounding) * scale**2)


def penalise_leaving(C: Array, scale: Array, weight: float) -> None:
    """Add `weight` in the direction that leaves the plane, in place."""
    from ..kernels.solve.relaxation.cpu import add_square

    u = scale.min() / scale
    u /= np.linalg.norm(u)
    add_square(C, u, weight)


def start_diagonal(sub: Subproblem, W: Array) -> Array:
    """The diagonal of `start_diagonals` with the smallest sum."""
    return min(start_diagonals(sub, W), key=lambda a: float(a.sum()))


def start_diagonals(sub: Subproblem, W: Array, has_time: Callable[[], bool] = lambda: True) -> list[Array]:
    """Diagonals that make W convex: a multiple of the node weights, and a multiple of the row sums.

    Only the first if it is no larger than the node weights, that is, if W was positive semidefinite, or if there is no
    time for the second.
    """
    if not W.any():
        return [np.zeros(sub.m)]
    found: list[Array] = []
    if (sub.linear > 0).all():
        a = made_convex(W, sub.linear, np.sqrt(sub.linear))
        if is_semidefinite(sub, a):
            return [a]
        if np.isfinite(a).all():  # else the weights are too far apart to scale
            found.append(a)
            if not has_time():
                return found
    rows = np.abs(W).sum(1)
    return [*found, made_convex(W, np.zeros(sub.m), np.sqrt(np.maximum(rows, 1e-9 * rows.max() + NOTHING)))]


def semidefinite_bound(sub: Subproblem) -> float:
    r"""Zero, but for rounding, where W is positive semidefinite; elsewhere below, by as much as it is not.

    :math:`W + \mathrm{Diag}\,a \succeq 0`, with a in proportion to the node weights l, gives :math:`f \ge` the sum of
    the k least :math:`l_i - a_i`. -inf where a node weight is negative.
    """
    if (sub.linear < 0).any():
        return -np.inf
    a = made_convex(sub.W, sub.linear, np.sqrt(sub.linear), penalty=0.0)
    least = np.sort(sub.linear - a)[: sub.k]
    size = sub.k * float((sub.linear_size + np.abs(a)).max()) + sub.constant_size
    bound = sub.constant + float(least.sum()) - EIGENVALUE_MARGIN * sub.m * _EPS * size
    return bound if np.isfinite(bound) else -np.inf


def is_semidefinite(sub: Subproblem, a: Array) -> bool:
    """Whether W with the node weights on its diagonal was convex, judged by `a`, a diagonal that makes it convex."""
    return bool((a <= sub.linear * (1 + SEMIDEFINITE_RTOL)).all())
