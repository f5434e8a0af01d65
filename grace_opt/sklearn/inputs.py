"""What `from_relevance_redundancy` is given, checked and in the form that its measures take.

Columns and numbers of y are without their means and of length 1, classes and categories are numbers from 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import type_of_target

from .._util.memory import free_memory
from .._util.parameters import integer, plain, shown
from ..errors import OptionError, ProblemError

#: Of an estimate of mutual information; scikit-learn's default.
NEIGHBORS = 3

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def unit_columns(X: Floats) -> Floats:
    """Return the columns without their means, scaled to length 1; zeros where a column is constant.

    Differences from the first row come before all else, and scales are powers of two: a column that varies in its last
    digits alone keeps them, and nothing overflows.

    Examples
    --------
    >>> unit_columns(np.array([[1e300, 5.0], [-1e300, 5.0]])).round(2).tolist()
    [[0.71, 0.0], [-0.71, 0.0]]
    """
    scaled = _to_one(X)
    apart = _to_one(scaled - scaled[0])
    centred = apart - apart.mean(axis=0)
    length = np.linalg.norm(centred, axis=0)
    return np.asarray(centred / np.where(length > 0, length, 1.0))


def _to_one(X: Floats) -> Floats:
    """Each column times the power of two that brings its largest number to [1/2, 1)."""
    return np.asarray(np.ldexp(X, -np.frexp(np.abs(X).max(axis=0))[1]))


def classes(y: Any, relevance: str) -> npt.NDArray[np.int64]:
    """The classes of y as numbers from 0."""
    numbers = f"for numbers write relevance={relevance.replace('classif', 'regression')!r}"
    try:
        names, codes = np.unique(y, return_inverse=True)
    except TypeError:
        raise ProblemError(
            "y mixes labels that have no order, such as texts and numbers: write y.astype(str)."
        ) from None
    if type_of_target(y, input_name="y") == "continuous":
        raise OptionError(f"relevance={relevance!r} needs classes, and y holds numbers with fractions: {numbers}.")
    if len(names) == 1:
        raise ProblemError(
            f"y has one class, {shown(plain(names[0]))}: no column says anything about it. Give rows of two classes or "
            "more, or relevance=None, which does without y."
        )
    if len(names) == len(codes):
        raise ProblemError(f"y has a class of its own for each of the {len(codes)} rows: {numbers}.")
    return np.asarray(codes, dtype=np.int64)


def numbers_of(y: Any) -> Floats:
    """The numbers of y without their mean, scaled to length 1."""
    found = unit_columns(np.asarray(y, dtype=np.float64)[:, None])[:, 0]
    if not found.any():
        raise ProblemError(
            f"y is {shown(plain(y[0]))} in every row: no column says anything about it. Give rows with different y, or "
            "relevance=None, which does without it."
        )
    return np.asarray(found)


def discrete_mask(discrete_features: Any, n: int) -> Bools:
    """`discrete_features` as a mask."""
    given, mask = np.asarray(discrete_features), np.zeros(n, dtype=np.bool_)
    try:
        if given.dtype.kind not in "biu":
            raise IndexError
        mask[given] = True
    except IndexError:
        raise OptionError(
            f"discrete_features={shown(discrete_features)}: give True, False, a bool mask of shape ({n},), or numbers "
            f"of columns, from 0 to {n - 1}."
        ) from None
    return mask


def with_codes(X: Floats, units: Floats, varying: Bools, discrete: Bools) -> Floats:
    """The varying columns, for mutual information: categories as numbers from 0, others in any scale, as estimates."""
    rows = len(X)
    if rows <= NEIGHBORS:
        raise ProblemError(f"X has {rows} rows: mutual information is estimated from at least {NEIGHBORS + 1}.")
    columns = units.copy()
    for at, j in enumerate(np.flatnonzero(varying)):
        if discrete[j]:
            values, columns[:, at] = np.unique(X[:, j], return_inverse=True)
            if len(values) == rows:
                raise ProblemError(
                    f"column {j} of X is among discrete_features and has a value of its own for each of the {rows} "
                    "rows: leave it out of them."
                )
    return columns


def seed_of(random_state: Any) -> int:
    """Return an integer for what scikit-learn calls a random state: itself, or one that is drawn from it.

    Examples
    --------
    >>> seed_of(7), seed_of(np.random.RandomState(0)) == seed_of(np.random.RandomState(0))
    (7, True)
    """
    bare = plain(random_state)
    if isinstance(bare, int):
        return integer("random_state", bare, at_least=0, at_most=2**32 - 1)
    return int(check_random_state(random_state).randint(2**31 - 1))


def refuse_beyond_memory(n: int) -> None:
    """Raise ProblemError if the pairs of n columns take more memory than is free."""
    need, free = 4.0 * 8 * n**2, free_memory()
    if need > free:
        raise ProblemError(
            f"X has {n:,} columns, whose pairs take {need / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are free: keep "
            "the most relevant columns first, by scikit-learn's SelectKBest."
        )
