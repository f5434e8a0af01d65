"""Matrices from what people have instead: networkx graphs and pandas DataFrames (with labels), condensed distances.

`Problem.of` calls these functions. Neither library is imported here: their objects are recognised by what they offer.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ProblemError
from .array_like import MAX_EXACT_INTEGER, too_large_error

Labels = tuple[Any, ...]


def with_labels(W: Any) -> tuple[Any, Labels | None]:
    """Return the matrix of a graph or a DataFrame with the names of its vertices; anything else as it is, with None.

    Raises
    ------
    ProblemError
        If a weight of a graph is no finite number, or the rows and columns of a DataFrame do not have equal labels.
    """
    if hasattr(W, "adjacency") and hasattr(W, "nodes"):
        return _from_graph(W)
    if hasattr(W, "columns") and hasattr(W, "index") and hasattr(W, "to_numpy"):
        return _from_frame(W)
    return W, None


def checked_labels(labels: Any, n: int) -> Labels:
    """Return names for n vertices as a tuple; raise ProblemError if they are not n different ones.

    Examples
    --------
    >>> checked_labels(["a", "b"], 2)
    ('a', 'b')
    """
    listed = labels.tolist() if hasattr(labels, "tolist") else labels
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise ProblemError(f"labels={labels!r}: give a list of {n} names, one per vertex.")
    if len(listed) != n:
        raise ProblemError(f"labels has {len(listed)} names, W has {n} vertices: give one per vertex.")
    if (again := first_repeated(listed)) is not None:
        raise ProblemError(f"labels names {again!r} twice: every vertex needs a name of its own.")
    return tuple(listed)


def first_repeated(labels: Sequence[Any]) -> Any:
    """Return the first label that came before; None if all differ."""
    seen: set[Any] = set()
    for label in labels:
        if label in seen:
            return label
        seen.add(label)
    return None


def from_condensed(distances: Tensor) -> Tensor:
    """Return the symmetric matrix with a zero diagonal of a condensed distance vector, as scipy's ``squareform``.

    Raises
    ------
    ProblemError
        If the length is not n (n - 1) / 2 for any n.

    Examples
    --------
    >>> from_condensed(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]]
    """
    length = len(distances)
    n = (1 + math.isqrt(1 + 8 * length)) // 2
    if length == 0 or n * (n - 1) // 2 != length:
        near = " or ".join(f"{m * (m - 1) // 2} (n = {m})" for m in ((n, n + 1) if length else (2,)))
        raise ProblemError(
            f"W has shape ({length},): give a square matrix (n, n), or the n (n - 1) / 2 distances that "
            f"scipy's pdist returns, {near} of them."
        )
    W = distances.new_zeros(n, n)
    i, j = torch.triu_indices(n, n, 1, device=distances.device)
    W[i, j] = distances
    W[j, i] = distances
    return W


def _from_frame(frame: Any) -> tuple[npt.NDArray[Any], Labels]:
    rows, columns = tuple(frame.index.tolist()), tuple(frame.columns.tolist())
    if len(rows) != len(columns):
        raise ProblemError(
            f"W is a DataFrame of shape {(len(rows), len(columns))}: give a square one, whose rows and columns are the "
            "vertices, such as frame.corr()."
        )
    for at, (row, column) in enumerate(zip(rows, columns, strict=True)):
        if row != column:
            same = set(rows) == set(columns)
            advice = "W.loc[W.columns]" if same else "W.set_axis(W.columns, axis=0) if the order of the rows is that"
            raise ProblemError(
                f"W is a DataFrame whose row {at} is called {row!r} and column {at} {column!r}: rows and columns must "
                f"have the same labels in the same order. Write {advice}."
            )
    if (again := first_repeated(columns)) is not None:
        raise ProblemError(f"W is a DataFrame with two columns called {again!r}: give every vertex its own label.")
    values = np.asarray(frame)
    if values.dtype.kind == "f":  # a column of large integers beside one of fractions was rounded
        for label, dtype in zip(columns, frame.dtypes.tolist(), strict=True):
            if getattr(dtype, "kind", "") in "iu" and len(columns):
                worst = max(map(int, frame[label].tolist()), key=abs)
                if abs(worst) > MAX_EXACT_INTEGER:
                    raise too_large_error("W", worst)
    return values, columns


def _from_graph(graph: Any) -> tuple[Any, Labels]:
    if graph.is_directed():
        raise ProblemError("the graph is directed: pass graph.to_undirected() if each edge's weight counts once.")
    labels = tuple(graph.nodes)
    place = {label: i for i, label in enumerate(labels)}
    entries = [(place[label], place[label], _weight(data, 0, f"node {label!r}")) for label, data in graph.nodes.items()]
    for a, b, data in graph.edges(data=True):
        weight = _weight(data, 1, f"edge ({a!r}, {b!r})")
        if a == b:
            entries.append((place[a], place[a], weight))
            continue
        if weight / 2 * 2 != weight:
            raise ProblemError(f"the weight {weight!r} of edge ({a!r}, {b!r}) is too small to be halved: scale W up.")
        entries += [(place[a], place[b], weight / 2), (place[b], place[a], weight / 2)]
    from scipy.sparse import coo_array

    row, column, weights = (np.array(part) for part in zip(*entries, strict=True)) if entries else ([], [], [])
    return coo_array((weights, (row, column)), shape=(len(labels), len(labels)), dtype=np.float64), labels


def _weight(data: Any, default: float, where: str) -> float:
    value = data.get("weight", default)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ProblemError(f"the weight of {where} is {value!r}: give a real number.")
    if isinstance(value, numbers.Integral) and abs(int(value)) > MAX_EXACT_INTEGER:
        raise too_large_error(f"the weight of {where}", int(value))
    try:
        weight = float(value)
    except OverflowError:  # for example a Fraction
        weight = math.inf
    if not math.isfinite(weight):
        raise ProblemError(f"the weight of {where} is {value!r}: every weight must be finite, as a float64 too.")
    return weight
