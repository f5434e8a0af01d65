"""Matrices from what people have instead: networkx graphs and pandas DataFrames (with labels), condensed distances.

`Problem.of` calls these functions. Neither library is imported here: their objects are recognised by what they offer.
`frames` reads DataFrames.
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
from .exact_integers import MAX_EXACT_INTEGER, too_large_error
from .frames import Labels, check_names, from_frame, is_frame
from .memory import refuse_beyond_memory

#: W_ij and W_ji may differ by so many rounding units of W's dtype, relative to √(m_i m_j), m_i being the largest size
#: in row and column i: sums of products of both vertices' numbers round so, and a giant elsewhere excuses nothing. Of
#: half precision fewer, as sums are rounded to it at the end. And by no more than these of the largest of all.
SYMMETRY_UNITS, HALF_UNITS, HALF_EPS, UNITS_OF_LARGEST = 256, 16, 2.0**-12, 16


def with_labels(W: Any) -> tuple[Any, Labels | None]:
    """Return the matrix of a graph or a DataFrame with the names of its vertices; anything else as it is, with None.

    A list of them is a batch, if all have the same names in the same order.

    Raises
    ------
    ProblemError
        If a weight of a graph is no finite number, the rows and columns of a DataFrame do not have equal labels, or
        those of a list do not.
    """
    if _is_graph(W):
        return _from_graph(W)
    if is_frame(W):
        return from_frame(W)
    if isinstance(W, list | tuple) and any(is_frame(one) or _is_graph(one) for one in W):
        return _from_list(W)
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
    check_names(listed, "labels: ", "vertex")
    return tuple(listed)


def place_of(index: Sequence[int], labels: Sequence[Any] | None) -> str:
    """Return how a message calls an entry of W, also by the names of its vertices.

    Examples
    --------
    >>> place_of([1, 0], None), place_of([3, 1, 0], ["a", "b"])
    ('W[1, 0]', "W[3, 1, 0] (row 'b', column 'a')")
    """
    names = "" if labels is None else f" (row {labels[index[-2]]!r}, column {labels[index[-1]]!r})"
    return f"W{list(index)}{names}"


def symmetry_rtol(eps: float) -> float:
    """Return by how much W_ij and W_ji may differ, relative to √(m_i m_j), for this eps; 0 for that of integers, 0.

    Examples
    --------
    >>> symmetry_rtol(2.0**-52) * 2**52, symmetry_rtol(2.0**-7) * 2**7, symmetry_rtol(0.0)
    (256.0, 16.0, 0.0)
    """
    return eps * (HALF_UNITS if eps > HALF_EPS else SYMMETRY_UNITS)


def asymmetric(
    index: Sequence[int], difference: float, eps: float, sizes: tuple[float, float, float], labels: Sequence[Any] | None
) -> ProblemError:
    """Return the error for two entries of W that should be equal; `sizes` are the roots of both, and the largest."""
    *batch, i, j = index
    names = "" if labels is None else f" ({labels[i]!r} and {labels[j]!r})"
    limit = "0, as these are integers"
    if eps:
        one, other, largest = sizes
        allowed = min(symmetry_rtol(eps) * one * other, UNITS_OF_LARGEST * eps * largest)
        limit = f"{allowed:.3g} (rounding, by the two vertices' largest weights)"
    return ProblemError(
        f"W is not symmetric: |W{[*batch, i, j]} - W{[*batch, j, i]}| = {difference:.3g}{names}, allowed {limit}. "
        "Both are one weight: if one half was left out, fill it, W + W.T with the diagonal once. If you mean the "
        "symmetric part, pass grace_opt.symmetrize(W); on the command line, --symmetrize."
    )


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


def _from_list(matrices: Sequence[Any]) -> tuple[npt.NDArray[Any], Labels]:
    """Return a batch of DataFrames or graphs, which must have the same names in the same order."""
    made = []
    for b, one in enumerate(matrices):
        if not (is_frame(one) or _is_graph(one)):
            raise ProblemError(
                f"W is a list in which some have labels, and W[{b}], a {type(one).__name__}, has none: give all with "
                "labels, or all as arrays, frame.to_numpy()."
            )
        made.append(from_frame(one, f"W[{b}]") if is_frame(one) else _from_graph(one))
    names = made[0][1]
    for b, (_, others) in enumerate(made):
        if len(others) != len(names):
            raise ProblemError(
                f"W[0] has {len(names)} vertices and W[{b}] has {len(others)}: a batch is of one size. Solve them one "
                "by one."
            )
        for place, (name, other) in enumerate(zip(names, others, strict=True)):
            if name != other:
                order = f"W[{b}].loc[W[0].columns, W[0].columns]"
                advice = (
                    f"Write {order}" if set(names) == set(others) and is_frame(matrices[b]) else "Solve them one by one"
                )
                raise ProblemError(
                    f"vertex {place} is called {name!r} in W[0] and {other!r} in W[{b}]: a batch has the same labels "
                    f"in the same order. {advice}."
                )
    refuse_beyond_memory("W", (len(made), len(names), len(names)), 8)
    return np.stack([matrix.toarray() if hasattr(matrix, "toarray") else matrix for matrix, _ in made]), names


def _is_graph(value: Any) -> bool:
    return hasattr(value, "adjacency") and hasattr(value, "nodes")


def lost_half_error(index: Sequence[int], total: float) -> ProblemError:
    """Return the error for two entries whose mean is no float64."""
    *batch, i, j = index
    there, back = (", ".join(map(str, (*batch, *pair))) for pair in ((i, j), (j, i)))
    return ProblemError(f"W[{there}] + W[{back}] = {total!r} is too small to be halved: scale W up.")


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

    row, column, weights = (np.array(column) for column in zip(*entries, strict=True)) if entries else ([], [], [])
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


def not_finite_error(where: str, value: float) -> ProblemError:
    """Return the error for a weight that is not finite; a file's 1e400 is read as infinite."""
    beyond = " (as any number beyond 1.8e308 is)" if math.isinf(value) else ""
    return ProblemError(f"{where} is {value}{beyond}: every weight must be finite. To forbid a vertex, use protected=.")
