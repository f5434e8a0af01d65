r"""Restricted eigenvalues of W on supports of size k, exactly by enumeration or as a certified range.

.. math:: \mu_{\min} = \min_{|T| = k} \lambda_{\min}(W_{TT}), \qquad \mu_{\max} = \max_{|T| = k} \lambda_{\max}(W_{TT})

Smaller supports change nothing, by Cauchy's interlacing. When: to evaluate a guarantee that is stated in
:math:`\kappa = \mu_{\max} / \mu_{\min}`. To find either is NP-hard in general (they are sparse principal components),
hence the ranges: outer ends from eigenvalues and rows of W, inner ends from supports that backward elimination finds.
Sources: GRACE (arXiv 2604.16983), the theory section; Moghaddam, Weiss, Avidan (2006) for the elimination.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from grace_opt.errors import ProblemError

Array = npt.NDArray[Any]
#: Supports whose eigenvalues are computed together.
BLOCK = 4096
#: LAPACK's symmetric eigenvalues are off by at most this times n·eps·‖W‖.
MARGIN = 8.0
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Restricted:
    """Certified ranges (low, high) of the restricted eigenvalues; `exact` if only rounding is left between the ends."""

    smallest: tuple[float, float]
    largest: tuple[float, float]
    exact: bool

    @property
    def kappa(self) -> tuple[float, float]:
        """The range of the condition number; infinite where the least eigenvalue may be, or is, zero."""
        low = _ratio(self.largest[0], self.smallest[1])
        return low, _ratio(self.largest[1], self.smallest[0])


def restricted_eigenvalues(
    W: Array, k: int, candidates: Array | None = None, *, enumerate_up_to: int = 20_000
) -> Restricted:
    """Restricted eigenvalues of a positive semidefinite W on k of the candidates.

    Parameters
    ----------
    W : ndarray (n, n)
    k : int
    candidates : ndarray (n,) of bool, optional
        Where supports may lie: not on protected channels. Default: everywhere.
    enumerate_up_to : int
        Largest number of supports that are all visited.

    Raises
    ------
    ProblemError
        If W is not positive semidefinite, or fewer than k candidates are left.

    Examples
    --------
    >>> found = restricted_eigenvalues(np.diag([1.0, 2.0, 8.0]), 2)
    >>> found.exact, round(found.kappa[0], 9), round(found.kappa[1], 9)
    (True, 8.0, 8.0)
    """
    A = np.asarray(W, dtype=np.float64)
    if candidates is not None:
        A = A[np.ix_(candidates, candidates)]
    m = len(A)
    if not 0 < k <= m:
        raise ProblemError(f"k = {k}: give 0 < k <= {m}, the number of candidates.")
    margin = MARGIN * m * _EPS * float(np.linalg.norm(A))
    values = np.linalg.eigvalsh(A)
    if values[0] < -margin:
        raise ProblemError(
            f"W has the eigenvalue {values[0]:.3g}: restricted eigenvalues bound nothing unless W is positive "
            "semidefinite. Give attention's W, or another Gram matrix."
        )
    if exact := math.comb(m, k) <= enumerate_up_to:
        low, high = _enumerated(A, k)
        inner = low, high
    else:
        inner = _eliminated(A, k)
        low, high = _outer(A, k, values)
    # What is within rounding of zero may be zero.
    smallest = max(low - margin, 0.0), max(inner[0], 0.0) + margin
    return Restricted(smallest, (max(inner[1] - margin, 0.0), high + margin), exact)


def scaled(W: Array) -> Array:
    """W with rows and columns divided by the roots of its diagonal, as covariances become correlations.

    Raises
    ------
    ProblemError
        If an entry of the diagonal is not positive.
    """
    roots = np.sqrt(np.diag(W).astype(np.float64))
    if not (roots > 0).all():
        raise ProblemError("W has a vertex of weight zero: scaling to a unit diagonal needs positive weights.")
    return np.asarray(W / np.outer(roots, roots))


def _enumerated(A: Array, k: int) -> tuple[float, float]:
    """Least and largest eigenvalue over all supports."""
    least, largest = math.inf, -math.inf
    supports = itertools.combinations(range(len(A)), k)
    while chunk := list(itertools.islice(supports, BLOCK)):
        T = np.array(chunk)
        values = np.linalg.eigvalsh(A[T[:, :, None], T[:, None, :]])
        least, largest = min(least, float(values[:, 0].min())), max(largest, float(values[:, -1].max()))
    return least, largest


def _outer(A: Array, k: int, values: Array) -> tuple[float, float]:
    """Ends that hold for every support: W's own eigenvalues, and Gershgorin's discs with the k - 1 largest entries."""
    weights = np.diag(A)
    others = np.abs(A - np.diag(weights))
    radius = np.sort(others, axis=1)[:, len(A) - (k - 1) :].sum(1) if k > 1 else np.zeros(len(A))
    low = max(float(values[0]), float((weights - radius).min()))
    trace = float(np.sort(weights)[-k:].sum())
    return low, min(float(values[-1]), float((weights + radius).max()), trace)


def _eliminated(A: Array, k: int) -> tuple[float, float]:
    """Eigenvalues of supports made by dropping, one after the other, what the extreme eigenvector uses least."""
    found = []
    for at in (0, -1):
        T = np.arange(len(A))
        while len(T) > k:
            vector = np.linalg.eigh(A[np.ix_(T, T)])[1][:, at]
            T = np.delete(T, int(np.abs(vector).argmin()))
        found.append(float(np.linalg.eigvalsh(A[np.ix_(T, T)])[at]))
    light, heavy = np.argsort(np.diag(A))[:k], np.argsort(np.diag(A))[-k:]
    least = min(found[0], float(np.linalg.eigvalsh(A[np.ix_(light, light)])[0]))
    return least, max(found[1], float(np.linalg.eigvalsh(A[np.ix_(heavy, heavy)])[-1]))


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.inf
