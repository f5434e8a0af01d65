r"""Semidefinite relaxations in a matrix variable: lower bounds that hold whatever the conic solver returned.

Use them through ``method="sdp"`` for the strongest bounds of this library, or directly:
`grace_opt.bounds.sdp_primal.solve_sdp` solves a relaxation of one dense instance with cvxpy, and `dual_bound` turns any
multipliers into a certified bound.

**The relaxation.** With Y = (1, x)(1, x)ᵀ for the indicator x of a k-vertex set, Shor's relaxation minimises ⟨W, X⟩
over ``Y = [[1, xᵀ], [x, X]]`` positive semidefinite, diag X = x, 1ᵀx = k, X1 = kx. No such Y is positive definite:
(-k, 1, …, 1) is in its kernel. On the remaining face, x = X1/k, so Y = U X Uᵀ with U = [1ᵀ/k; I]. The same
relaxation, now with an interior and sparse rows, is

.. math:: \min \langle W, X\rangle \quad\text{over}\quad X \succeq 0,\ \mathrm{diag}\,X = X1/k,\ 1^\top X 1 = k^2 .

``"dnn"`` adds X ≥ 0, and ``"rlt"`` also ``X_ij ≤ x_i`` and ``X_ij ≥ x_i + x_j - 1``.

**The bound.** For *every* symmetric M and every k-vertex set S with X = 1_S 1_Sᵀ,

.. math:: f(S) = \langle W - M, X\rangle + \langle M, X\rangle \ge
          \min_{S'} \langle W - M, 1_{S'}1_{S'}^\top\rangle + k\,\lambda_{\min}(M),

since X is positive semidefinite of trace k. (With an orthonormal basis V of the face, the same bound would be
``-(1 + k) λ_max(VᵀZV)``, and V would add rounding errors.) With M = W + (multipliers × constraints), the minimum is
over separable terms, see `dual_bound`. The solver's accuracy decides how tight the bound is, not whether it holds.

Sources: Shor (1987); Rendl & Sotirov, Math. Program. 109 (2007), for the face; Jansson, Chaykin & Keil, SIAM J. Numer.
Anal. 46 (2008), for rigorous bounds from approximate multipliers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._util.arrays import least_eigenvalue, power_of_two_scale

Array = npt.NDArray[np.float64]

#: Forming M and computing its least eigenvalue is off by at most this times m·eps·‖ |terms of M| ‖_F.
EIGENVALUE_MARGIN = 16.0
#: The sums of the separable part are off by at most this times m·eps·Σ|terms|.
SUM_MARGIN = 8.0
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class SdpMultipliers:
    """Multipliers of the relaxation's constraints; any finite values give a valid bound.

    Attributes
    ----------
    square : (m,) array
        Of ``X_ii = (X1)_i / k``.
    total : float
        Of ``1ᵀX1 = k²``.
    both, one, neither : (m, m) arrays with zero diagonal, or None
        Of ``X_ij ≥ 0`` (both chosen, symmetric), ``x_i - X_ij ≥ 0`` (i chosen, j not) and ``1 - x_i - x_j + X_ij ≥ 0``
        (neither chosen, symmetric), summed over ordered pairs.
    """

    square: Array
    total: float = 0.0
    both: Array | None = None
    one: Array | None = None
    neither: Array | None = None

    @classmethod
    def zero(cls, m: int) -> SdpMultipliers:
        """No multipliers: M = W, and the bound is k times the least eigenvalue."""
        return cls(np.zeros(m))


def dual_bound(W: Array, k: int, multipliers: SdpMultipliers) -> float:
    r"""Certified lower bound on f over all k-vertex sets, valid for any multipliers.

    With u, y, B, C, H for ``square``, ``total``, ``both``, ``one``, ``neither``, every k-vertex set S has

    .. math:: f(S) = \langle M, 1_S 1_S^\top\rangle - y k^2 - \sum_{i \ne j} H_{ij}
              + \sum_{\substack{i \ne j\\ i, j \in S}} B_{ij} + \sum_{i \in S, j \notin S} C_{ij}
              + \sum_{\substack{i \ne j\\ i, j \notin S}} H_{ij},

    where M is W plus each multiplier times its constraint. The first term is at least :math:`k \lambda_{\min}(M)`. The
    last three are bounded row by row: a chosen i has exactly k - 1 chosen neighbours, which cost at least
    :math:`\sum_j C_{ij}` plus the k - 1 smallest :math:`B_{ij} - C_{ij}`; an unchosen one has m - k - 1 unchosen
    neighbours; and the k rows that cost least when chosen are taken as chosen.

    Parameters
    ----------
    W : (m, m) float64 array, symmetric
    k : int, 1 <= k < m
    multipliers : SdpMultipliers

    Returns
    -------
    float
        -inf if the multipliers are not finite, or so large that the sums overflow.

    Notes
    -----
    Tolerance: computed in float64, less ``16 k m eps ‖T‖_F`` for the eigenvalue and for forming M, where T is the sum
    of the absolute values of M's terms, and less ``8 m eps Σ|terms|`` for the sums. The returned number is a bound for
    W as stored. O(m³).

    Examples
    --------
    >>> W = np.array([[2.0, 1.0], [1.0, 2.0]])
    >>> round(dual_bound(W, 1, SdpMultipliers.zero(2)), 6), round(dual_bound(W, 1, SdpMultipliers(np.ones(2), -1.0)), 6)
    (1.0, 1.0)
    """
    m, scale = len(W), power_of_two_scale(W)
    off = ~np.eye(m, dtype=bool)
    parts = (multipliers.both, multipliers.one, multipliers.neither)
    with np.errstate(all="ignore"):  # overflow ends as -inf below
        u, y = multipliers.square / scale, multipliers.total / scale
        B, C, H = (np.zeros((m, m)) if part is None else np.where(off, part / scale, 0.0) for part in parts)
        B, H = (B + B.T) / 2, (H + H.T) / 2
        tilt = (u[:, None] + u[None, :]) / (2 * k)
        sides = (C + C.T) / 2
        M = W / scale + np.diag(u) - tilt + y - B + sides - H
        M[~off] += 2 * H.sum(1) - C.sum(1)
        terms = np.abs(W / scale) + np.abs(tilt) + abs(y) + np.abs(B) + np.abs(C) / 2 + np.abs(C.T) / 2 + np.abs(H)
        terms[~off] += np.abs(u) + 2 * np.abs(H).sum(1) + np.abs(C).sum(1)
        size = np.linalg.norm(terms)
        weight = abs(y) * k * k + np.abs(B).sum() + 2 * np.abs(C).sum() + 3 * np.abs(H).sum()
        if not (np.isfinite(size) and np.isfinite(weight)):
            return -math.inf
        least = least_eigenvalue(M) - EIGENVALUE_MARGIN * m * _EPS * size
        chosen = C.sum(1) + _row_minima(B - C, off, k - 1)
        unchosen = _row_minima(H, off, m - k - 1)
        separable = unchosen.sum() + np.sort(chosen - unchosen)[:k].sum() - H.sum() - y * k * k
        bound = scale * float(k * least + separable - SUM_MARGIN * m * _EPS * weight)
    return math.nextafter(bound, -math.inf) if math.isfinite(bound) else -math.inf  # for tiny W the product also rounds


def _row_minima(A: Array, off: npt.NDArray[np.bool_], count: int) -> Array:
    """Sum of each row's `count` smallest off-diagonal entries."""
    m = len(A)
    ordered = np.sort(A[off].reshape(m, m - 1), axis=1)
    return np.asarray(ordered[:, : max(count, 0)].sum(1))
