"""`from_relevance_redundancy`: maximum relevance, minimum redundancy (mRMR) of columns, as W for `grace_opt.solve`.

Correlations are those of the rows given, up to rounding. Mutual information is estimated from nearest neighbours, by
scikit-learn. Sources: Peng, Long & Ding, IEEE TPAMI 27 (2005) for the criterion; Rodriguez-Lujan, Huerta, Elkan & Santa
Cruz, JMLR 11 (2010) for the quadratic program and alpha.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils import check_array, check_X_y

from .._util.parameters import choice, integer, number
from .inputs import Floats, discrete_mask, refuse_beyond_memory, seed_of, unit_columns, with_codes
from .measures import correlation_with, correlations, mutual_information, mutual_information_with

RELEVANCES = ("f_classif", "f_regression", "mutual_info_classif", "mutual_info_regression")
REDUNDANCIES = ("correlation", "mutual_info")


def from_relevance_redundancy(
    X: Any,
    y: Any,
    k: int,
    *,
    relevance: str | None = "f_classif",
    redundancy: str = "correlation",
    alpha: float = 0.5,
    discrete_features: Any = False,
    random_state: Any = 0,
) -> Floats:
    r"""Return W, whose f is least for the k columns that are most relevant to y and least redundant.

    .. math::

        f(S) = \frac{1 - \alpha}{k^2} \sum_{i \ne j \in S} R_{ij} \; - \; \frac{\alpha}{k} \sum_{i \in S} d_i

    With :math:`\alpha = 1/2` and correlations, sets of k columns are in the order of mRMR, which counts
    :math:`R_{ii} = 1` as well. QPFS has the same two sums for :math:`x = 1_S / k`, with the weights
    :math:`(1 - \alpha') / 2` and :math:`\alpha'`, and allows any :math:`x \ge 0` that sums to 1.

    Parameters
    ----------
    X : array_like (N, n)
        A row for each sample and a column for each feature; finite numbers.
    y : array_like (N,), or None
        Classes, or numbers; None with ``relevance=None``.
    k : int
        Number of columns that will be chosen: the criterion is a mean, so W depends on it.
    relevance : str or None
        :math:`d_i`, by the names of scikit-learn's functions. For classes: "f_classif", the correlation ratio
        :math:`\eta`, which is ordered as F is and lies between 0 and 1, and is the absolute correlation if there are
        two classes; or "mutual_info_classif". For numbers: "f_regression", the absolute correlation; or
        "mutual_info_regression". None: y is not used, and alpha counts as 0.
    redundancy : str
        :math:`R_{ij}`: "correlation", the absolute value of Pearson's, or "mutual_info", in nats.
    alpha : float
        The weight of relevance, from 0 (redundancy alone) to 1 (relevance alone, as ``SelectKBest``).
    discrete_features : bool or array_like
        For mutual information, which columns hold categories: all, none, a bool mask (n,), or their numbers.
    random_state : int, RandomState or None
        For mutual information: seed of the tiny noise that separates equal values.

    Returns
    -------
    ndarray (n, n), float64
        A constant column says nothing. It has no relevance, and is as redundant as any pair is, with every column and
        with itself, so that it is chosen last.

    Raises
    ------
    OptionError, ProblemError, ValueError, TypeError
        The last two are scikit-learn's, for an X or y that it refuses: NaN, another number of rows, sparse X.

    Notes
    -----
    Correlations take O(N n²); mutual information between columns is n² / 2 estimates, of milliseconds each.

    References
    ----------
    Mutual information: Kraskov, Stögbauer & Grassberger, Phys. Rev. E 69 (2004); Ross, PLoS ONE 9 (2014).

    Examples
    --------
    >>> import grace_opt
    >>> X = [[0.0, 0.1, 1.0], [1.0, 0.9, 0.0], [2.0, 2.1, 0.0], [3.0, 2.9, 1.0]]  # the first two say nearly the same
    >>> W = from_relevance_redundancy(X, [0.0, 1.0, 2.0, 4.0], 2, relevance="f_regression")
    >>> grace_opt.solve(W, 2, "exhaustive").indices
    array([0, 2])
    """
    supervised = relevance is not None
    if supervised:
        choice("relevance", relevance, RELEVANCES)
    choice("redundancy", redundancy, REDUNDANCIES)
    weight = number("alpha", alpha, at_least=0, at_most=1)
    if supervised:
        X, y = check_X_y(X, y, dtype=np.float64, ensure_min_samples=2)
    else:
        X = check_array(X, dtype=np.float64, ensure_min_samples=2)
    n = X.shape[1]
    size = integer("k", k, at_least=1, at_most=n)
    refuse_beyond_memory(n)
    seed = seed_of(random_state)
    units = unit_columns(X)
    varying = np.asarray(units.any(axis=0))
    units, columns, discrete = units[:, varying], units[:, varying], np.zeros(n, dtype=np.bool_)
    if redundancy == "mutual_info" or (relevance or "").startswith("mutual_info"):
        discrete = discrete_mask(discrete_features, n)
        columns = with_codes(X, units, varying, discrete)
    informed = columns, discrete[varying], seed
    between = np.zeros((n, n))
    between[np.ix_(varying, varying)] = (
        correlations(units) if redundancy == "correlation" else mutual_information(*informed)
    )
    between[~varying, :] = between[:, ~varying] = between.max() or 1.0
    if relevance is None:
        return np.asarray(between / size**2)
    about_y = (
        mutual_information_with(y, relevance, *informed)
        if relevance.startswith("mutual_info")
        else correlation_with(y, relevance, units)
    )
    W = (1 - weight) / size**2 * between
    W[varying, varying] -= weight / size * about_y
    return np.asarray(W)
