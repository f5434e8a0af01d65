"""pandas DataFrames to numbers and labels; what cannot be a matrix of weights is refused by label and place.

When: `matrices.with_labels`, for W. pandas is not imported here: a DataFrame is recognised by what it offers. Nullable
columns (Int64, Float64, pyarrow's) are read as the numbers that they hold.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ProblemError
from .exact_integers import MAX_EXACT_INTEGER, too_large_error
from .parameters import shown

Labels = tuple[Any, ...]


def is_frame(value: Any) -> bool:
    """Return whether a value is a DataFrame."""
    return hasattr(value, "columns") and hasattr(value, "index") and hasattr(value, "to_numpy")


def from_frame(frame: Any, name: str = "W") -> tuple[npt.NDArray[Any], Labels]:
    """Return the numbers and the labels of a DataFrame whose rows and columns are the same vertices.

    Parameters
    ----------
    frame : DataFrame
    name : str
        What to call it in a message.

    Raises
    ------
    ProblemError
        If it is not square, a label is missing or repeated, rows and columns are labelled differently, or a cell of a
        nullable or object column is no number. NaN among plain floats is left to the checks of W.
    """
    rows, columns = tuple(frame.index.tolist()), tuple(frame.columns.tolist())
    if len(rows) != len(columns):
        raise ProblemError(
            f"{name} is a DataFrame of shape {(len(rows), len(columns))}: give a square one, whose rows and columns "
            "are the vertices, such as frame.corr()."
        )
    for labels, kind in ((columns, "column"), (rows, "row")):
        check_names(labels, f"{name} is a DataFrame whose ", kind)
    for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
        if row != column:
            same = set(rows) == set(columns)
            order = f"{name}.loc[{name}.columns]"
            advice = order if same else f"{name}.set_axis({name}.columns, axis=0) if the order of the rows is that"
            raise ProblemError(
                f"{name} is a DataFrame whose row {i} is called {row!r} and column {i} {column!r}: rows and columns "
                f"must have the same labels in the same order. Write {advice}."
            )
    values = np.asarray(frame)
    if values.dtype.kind == "O":
        values = _from_objects(frame, values, columns, name)
    if values.dtype.kind == "f":  # a column of large integers beside one of fractions was rounded
        for label, dtype in zip(columns, frame.dtypes.tolist(), strict=True):
            if getattr(dtype, "kind", "") in "iu" and len(columns):
                worst = max(map(int, frame[label].tolist()), key=abs)
                if abs(worst) > MAX_EXACT_INTEGER:
                    raise too_large_error(name, worst)
    return values, columns


def check_names(names: Sequence[Any], whose: str, kind: str, first: int = 0) -> None:
    """Raise ProblemError unless all names are there, can be looked up, and differ.

    Parameters
    ----------
    names : sequence
    whose, kind : str
        How a message begins, and what has the names.
    first : int
        The number of the first one, for messages.

    Examples
    --------
    >>> check_names(["a", "b", "a"], "labels: ", "vertex")
    Traceback (most recent call last):
    grace_opt.errors.ProblemError: labels: vertex 0 and vertex 2 are both called 'a': give every vertex its own label.
    """
    seen: dict[Any, int] = {}
    for i, label in enumerate(names, first):
        try:
            before = seen.setdefault(label, i)
        except TypeError:
            raise ProblemError(
                f"{whose}{kind} {i} is called {shown(label)}, a {type(label).__name__}: give texts, numbers, or "
                "tuples of them."
            ) from None
        if _is_missing(label):
            raise ProblemError(f"{whose}{kind} {i} is called {label!r}: give every vertex a label.")
        if before != i:
            raise ProblemError(
                f"{whose}{kind} {before} and {kind} {i} are both called {label!r}: give every vertex its own label."
            )


def _from_objects(frame: Any, values: npt.NDArray[Any], labels: Labels, name: str) -> npt.NDArray[Any]:
    """Return the numbers of nullable columns; raise where a cell is none, or a column is of objects."""
    for i, j in np.ndindex(values.shape):
        cell = values[i, j]
        if isinstance(cell, numbers.Real) and not isinstance(cell, bool | np.bool_) and not _is_missing(cell):
            continue
        place = f"{name}.loc[{labels[i]!r}, {labels[j]!r}] is {shown(cell)}"
        if _is_missing(cell):
            raise ProblemError(
                f"{place}: every weight must be a number. Write {name}.fillna(value) with the one meant."
            )
        raise ProblemError(f"{place}, a {type(cell).__name__}: give numbers, for instance {name}.astype(float).")
    kinds = [getattr(dtype, "numpy_dtype", dtype) for dtype in frame.dtypes.tolist()]
    for label, kind in zip(labels, kinds, strict=True):
        if getattr(kind, "kind", "O") not in "iuf":
            raise ProblemError(f"column {label!r} of {name} has dtype {kind}: write {name}.astype(float).")
    return values.astype(np.result_type(*kinds))


def _is_missing(value: Any) -> bool:
    """Return whether a value stands for none: None, and what does not equal itself, as NaN, NaT and pandas.NA."""
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas.NA is neither
        return True
