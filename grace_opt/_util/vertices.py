"""Convert sets of vertices (``protected=``, ``required=``) to masks: numbers, bool masks, or names where W has names.

When: `Problem.of`, `Reduction.of`, ``start=``. Every kind of wrong input has its own message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ProblemError
from .array_like import as_tensor


def vertex_mask(
    value: Any, name: str, labels: Sequence[Any] | None, batch: tuple[int, ...], n: int, device: torch.device
) -> Tensor:
    """Return the vertices as a bool mask, (n,) or one that broadcasts to (*batch, n).

    Parameters
    ----------
    value : array_like or None
        A bool mask (n,) or (..., n); or vertices: by name if there are `labels`, else by number.
    name : str
        The argument's name, for messages.
    labels : sequence or None
        Names of the vertices: nodes of a graph, labels of a DataFrame.
    batch, n, device
        Of W.

    Raises
    ------
    ProblemError
        The message says what is wrong and what to write instead.

    Examples
    --------
    >>> vertex_mask(["b"], "protected", ("a", "b"), (), 2, torch.device("cpu"))
    tensor([False,  True])
    """
    if value is None:
        return torch.zeros(n, dtype=torch.bool, device=device)
    if labels is not None:
        mask = torch.from_numpy(_named_mask(value, name, {label: i for i, label in enumerate(labels)})).to(device)
        return _fitting(mask, name, batch, n)
    return _numbered_mask(value, name, batch, n, device)


def _numbered_mask(value: Any, name: str, batch: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    if isinstance(value, set | frozenset | range):
        value = list(value)
        if any(isinstance(vertex, bool | np.bool_) for vertex in value):
            raise ProblemError(f"{name} is a set of bools, which has no order: give a list, a bool mask (..., {n}).")
    wanted = f"a list of vertices by number, from 0 to {n - 1}, or a bool mask of shape {_shapes(batch, n)}"
    tensor = as_tensor(value, name, wanted).to(device)
    if tensor.dtype == torch.bool:
        return _fitting(tensor, name, batch, n)
    if tensor.numel() == 0:
        tensor = tensor.to(torch.int64)  # an empty list has no dtype of its own
    if tensor.dtype.is_floating_point:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ProblemError(f"{name} has dtype {kind}: give {wanted}.")
    if tensor.ndim != 1:
        raise ProblemError(
            f"{name} indices have shape {tuple(tensor.shape)}: give a flat list that holds for every instance, "
            f"or a bool mask of shape {(*batch, n)} for one set per instance."
        )
    if tensor.numel() and not (int(tensor.min()) >= 0 and int(tensor.max()) < n):
        raise ProblemError(
            f"{name} holds vertex {int(tensor[(tensor < 0) | (tensor >= n)][0])}: vertices are 0 to {n - 1}."
        )
    _check_distinct(tensor.tolist(), name, n)
    mask = torch.zeros(n, dtype=torch.bool, device=device)
    mask[tensor] = True
    return mask


def _fitting(mask: Tensor, name: str, batch: tuple[int, ...], n: int) -> Tensor:
    try:
        if mask.shape[-1:] != (n,):
            raise RuntimeError
        mask.expand(*batch, n)
    except RuntimeError:
        raise ProblemError(
            f"{name} is a bool mask of shape {tuple(mask.shape)}: give one entry per vertex, shape {_shapes(batch, n)}."
        ) from None
    return mask


def _shapes(batch: tuple[int, ...], n: int) -> str:
    return " or ".join(map(str, dict.fromkeys([(n,), (*batch, n)])))


def _check_distinct(vertices: list[Any], name: str, n: int) -> None:
    if len(set(vertices)) < len(vertices):
        hint = " It looks like a 0/1 mask: pass it as bool." if len(vertices) == n else ""
        raise ProblemError(f"{name} names a vertex twice.{hint}")


def _named_mask(value: Any, name: str, place: dict[Any, int]) -> np.ndarray[Any, Any]:
    """Return the named vertices as a bool mask; masks of any kind stay masks."""
    if hasattr(value, "dtype") and not np.ma.isMaskedArray(value):
        if hasattr(value, "index") and getattr(value.dtype, "kind", "") == "b":
            _check_aligned(value, name, list(place))
        if _holds_names(value):
            value = value.tolist()
    if hasattr(value, "dtype"):
        wanted = f"a list of nodes or labels of W, or a bool mask of shape ({len(place)},)"
        tensor = as_tensor(value, name, wanted).cpu()
        if tensor.dtype == torch.bool:
            return np.asarray(tensor.numpy())
        value = tensor.tolist()
    if isinstance(value, str) or _position(value, place) is not None:
        raise ProblemError(f"{name}={value!r}: give a list of nodes or labels, {name}=[{value!r}].")
    if not isinstance(value, Iterable):
        raise ProblemError(f"{name}={value!r}: give a list of nodes or labels of W, or a bool mask.")
    nodes = list(value)
    bools = [isinstance(node, bool | np.bool_) for node in nodes]
    if nodes and all(bools) and isinstance(value, list | tuple):
        if any(isinstance(label, bool) for label in place):
            raise ProblemError(
                f"{name}={value!r}: a mask, or nodes of this graph, which has bools for nodes? "
                "Write np.array(mask, dtype=bool) for a mask, a set for nodes."
            )
        return np.array(nodes, dtype=bool)
    labels = list(place)
    for node, is_bool in zip(nodes, bools, strict=True):
        vertex = _position(node, place)
        # True equals 1 and would find node 1, but does not name it; nor does 1 name a node called True.
        if vertex is None or is_bool != isinstance(labels[vertex], bool | np.bool_):
            few = ", ".join(map(repr, labels[:5])) + (", …" if len(labels) > 5 else "")
            raise ProblemError(f"{name} names {node!r}, which is not a node or label of W; there are {few}.")
    _check_distinct(nodes, name, len(place))
    mask = np.zeros(len(place), dtype=bool)
    mask[[place[node] for node in nodes]] = True
    return mask


def _holds_names(value: Any) -> bool:
    """Whether an array, a pandas Index or a Series holds names: anything but numbers and bools."""
    return not isinstance(value, Tensor) and getattr(value.dtype, "kind", "O") not in "iufbc"


def _check_aligned(series: Any, name: str, labels: list[Any]) -> None:
    """Raise where a pandas Series of bools lists other vertices than W, or the same ones in another order."""
    index = series.index.tolist() if hasattr(series.index, "tolist") else labels
    if index not in (labels, list(range(len(index)))):
        raise ProblemError(
            f"{name} is a Series of bools whose index is not W's labels in the same order: write "
            f"{name}={name}.reindex(W.index), or give the names."
        )


def _position(node: Any, place: dict[Any, int]) -> int | None:
    try:
        return place.get(node)
    except TypeError:  # a list, for example, cannot be a node
        return None
