"""`SubsetSelector`: the k columns of a table that are most relevant and least redundant, as a transformer.

When: in a pipeline of scikit-learn, or on its own. It does what `from_relevance_redundancy` and `grace_opt.solve` do.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from .._util.parameters import integer, number, plain
from ..api import solve
from ..errors import OptionError
from ..registry import MethodOptions
from ..solution import Solution, Status
from .inputs import seed_of
from .relevance_redundancy import from_relevance_redundancy


class SubsetSelector(SelectorMixin, BaseEstimator):
    r"""Keep the k columns that are most relevant to y and least redundant: mRMR, solved as a whole.

    Other implementations of mRMR add one column at a time. This one weighs sets of k columns against each other, and
    says how far from optimal its choice can be: optimal for the criterion, which is not the error of a model.

    Parameters
    ----------
    n_features_to_select : int or float
        Number of columns to keep, or their share, rounded down, of which 1 column is the least.
    relevance : {"f_classif", "f_regression", "mutual_info_classif", "mutual_info_regression"} or None
        How much a column says about y: "..._classif" for classes, "..._regression" for numbers. None: y is not used,
        and the columns are those that repeat each other least.
    redundancy : {"correlation", "mutual_info"}
        How much two columns repeat each other.
    alpha : float
        The weight of relevance, from 0 to 1; redundancy has 1 - alpha. 1/2 is that of mRMR.
    discrete_features : bool or array_like
        For mutual information, which columns hold categories: all, none, a bool mask, or their numbers.
    method : str or options object
        As in `grace_opt.solve`: "portfolio" gives a bound, "branch_and_bound" proves its answer if given the time.
    time_limit : float, optional
        Seconds of `grace_opt.solve`. Relevance and redundancy are computed before.
    random_state : int, RandomState or None
        Seed of the method, and of the estimates of mutual information. None: another answer may come each time.

    Attributes
    ----------
    support_ : ndarray (n,), bool
        The columns that are kept.
    solution_ : Solution
        The choice with its objective, bound, gap and status.
    n_features_in_ : int
    feature_names_in_ : ndarray (n,)
        Names of the columns, if X had them and they are all texts.

    Raises
    ------
    OptionError, ProblemError, UnknownSolverError, ValueError, TypeError
        By `fit`. The last two are scikit-learn's, for an X or y that it refuses: NaN, sparse X, a missing y.

    See Also
    --------
    from_relevance_redundancy : The criterion, and the W that is solved.

    Notes
    -----
    Complexity is that of `from_relevance_redundancy` and of the method. Columns of any scale: relevance and redundancy
    do not depend on it. Ctrl-C raises KeyboardInterrupt, as scikit-learn's own estimators do.

    References
    ----------
    Peng, Long & Ding, IEEE TPAMI 27 (2005).

    Examples
    --------
    >>> from sklearn.datasets import load_wine
    >>> X, y = load_wine(return_X_y=True, as_frame=True)
    >>> selector = SubsetSelector(4, method="branch_and_bound").fit(X, y)
    >>> selector.get_feature_names_out().tolist()
    ['alcohol', 'hue', 'od280/od315_of_diluted_wines', 'proline']
    >>> selector.solution_.status.name
    'OPTIMAL'
    """

    def __init__(
        self,
        n_features_to_select: int | float = 0.5,
        *,
        relevance: str | None = "f_classif",
        redundancy: str = "correlation",
        alpha: float = 0.5,
        discrete_features: Any = False,
        method: str | MethodOptions = "portfolio",
        time_limit: float | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_features_to_select = n_features_to_select
        self.relevance = relevance
        self.redundancy = redundancy
        self.alpha = alpha
        self.discrete_features = discrete_features
        self.method = method
        self.time_limit = time_limit
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> SubsetSelector:
        """Choose the columns.

        Parameters
        ----------
        X : array_like or DataFrame (N, n)
            A row for each sample and a column for each feature; finite numbers.
        y : array_like (N,), optional
            Classes, or numbers. Not used with ``relevance=None``.

        Returns
        -------
        SubsetSelector
            This one.
        """
        if self.relevance is None:
            X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        else:
            X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        k, seed = _count(self.n_features_to_select, X.shape[1]), seed_of(self.random_state)
        W = from_relevance_redundancy(
            X,
            y,
            k,
            relevance=self.relevance,
            redundancy=self.redundancy,
            alpha=self.alpha,
            discrete_features=self.discrete_features,
            random_state=seed,
        )
        solution: Solution = solve(W, k, self.method, seed=seed, time_limit=self.time_limit)
        if solution.status is Status.INTERRUPTED:  # a search over settings would go on with the next fit
            raise KeyboardInterrupt
        self.solution_ = solution
        self.support_ = solution.mask
        return self

    def _get_support_mask(self) -> npt.NDArray[np.bool_]:
        check_is_fitted(self)
        return np.asarray(self.support_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = self.relevance is not None
        return tags


def _count(wanted: Any, n: int) -> int:
    """The number of columns that a number or a share asks for."""
    name, bare = "n_features_to_select", plain(wanted)
    if isinstance(bare, numbers.Integral) or not isinstance(bare, numbers.Real):
        k = integer(name, wanted, at_least=1, hint="or a share such as 0.5")
        if k > n:
            raise OptionError(f"{name}={k}, and X has {n} columns: give at most {n}, or a share such as 0.5.")
        return k
    return max(1, int(number(name, wanted, above=0, at_most=1, hint="a share of the columns, or an integer") * n))
