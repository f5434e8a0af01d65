"""Matrices with a parameter that decides how hard greedy finds them, and how large the paper's bound is.

When: `bounds`. `simplex` is where greedy is provably as bad as an arbitrary set; `equicorrelated` varies how much
channels correlate; `ridged` hides an optimum of known size. docs/theory/approximation.md has the proof.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from grace_opt.errors import OptionError
from grace_opt.instances import generators

Array = npt.NDArray[Any]


def simplex(k: int, ridge: float, weight: float = 0.5) -> Array:
    r"""Where greedy is provably bad: k single vertices that it takes, and k others that cancel, n = 2k.

    .. math:: W = \begin{pmatrix} b I & 0 \\ 0 & \frac{k}{k-1} (I - \frac1k 1 1^\top) \end{pmatrix} + \delta I

    with b = `weight` < 1 and :math:`\delta` = `ridge`. MIES, THINK and exchanges of single vertices end at
    :math:`k (b + \delta)`; the optimum is :math:`k \delta`; :math:`\kappa = 1 + k / ((k - 1) \delta)`.
    docs/theory/approximation.md has the proof.

    Examples
    --------
    >>> import grace_opt
    >>> W = simplex(4, ridge=0.25)
    >>> [round(float(grace_opt.solve(W, 4, method).objective), 9) for method in ("mies", "exhaustive")]
    [3.0, 1.0]
    """
    if k < 2 or ridge < 0 or not 0 < weight < 1:
        raise OptionError(f"k={k}, ridge={ridge}, weight={weight}: k >= 2, ridge >= 0, 0 < weight < 1.")
    W = np.zeros((2 * k, 2 * k))
    W[:k, :k] = weight * np.eye(k)
    # Diagonal 1 and rows that sum to zero: the Gram matrix of a regular simplex.
    W[k:, k:] = (k * np.eye(k) - 1) / (k - 1)
    return W + ridge * np.eye(2 * k)


def equicorrelated(
    n: int, correlation: float, seed: int, rows: int = 64, sigma: float = 0.5, k: int | None = None
) -> Array:
    r"""W = (QᵀQ)∘(KᵀK) of Gaussian Q and K, any two channels of which correlate by the same amount.

    A channel is :math:`\sqrt\rho\, z_0 + \sqrt{1 - \rho}\, z_i` times a lognormal scale with standard deviation
    `sigma`; mean diagonal 1. With few `rows`, W is singular: its rank is at most rank(Q) rank(K).

    Examples
    --------
    >>> W = equicorrelated(4, 1.0, seed=0, sigma=0.0)
    >>> bool(np.allclose(W, 1.0))
    True
    """
    if not 0 <= correlation <= 1:
        raise OptionError(f"correlation={correlation}: give a number from 0 to 1.")
    rng = np.random.default_rng([seed, n, round(1e6 * correlation)])

    def channels() -> Array:
        drawn = np.sqrt(correlation) * rng.standard_normal((rows, 1))
        drawn = drawn + np.sqrt(1 - correlation) * rng.standard_normal((rows, n))
        return np.asarray(drawn * rng.lognormal(0, sigma, n))

    Q, K = channels(), channels()
    W: Array = (Q.T @ Q) * (K.T @ K)
    return np.asarray(W / W.trace() * n)


def ridged(n: int, k: int, seed: int, ridge: float) -> Array:
    """`generators.planted` plus a ridge: the planted set has f = k ridge, and no set has less."""
    return np.asarray(generators.planted(n, k, seed).W + ridge * np.eye(n))


FAMILIES: dict[str, Callable[..., Array]] = {
    "simplex": simplex,
    "equicorrelated": equicorrelated,
    "low_rank": functools.partial(equicorrelated, rows=2),  # rank(W) <= 4
    "ridged": ridged,
}
