"""Convert the other inputs of a problem: k per instance, protected vertices to a mask, networkx graphs to W.

`Problem.of` calls these functions. Every kind of wrong input has its own message.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ProblemError
from .array_like import MAX_EXACT_INTEGER, as_tensor, too_large_error
from .arrays import count_true


def k_per_instance(k: Any, batch: tuple[int, ...], n: int, device: torch.device) -> tuple[Tensor, int]:
    """Return one k per instance, (...) int64, and the largest of them."""
    if isinstance(k, numbers.Integral) and not isinstance(k, bool | np.bool_):
        if not 0 <= int(k) <= n:
            raise ProblemError(f"k = {int(k)}: must lie between 0 and n = {n}.")
        return torch.full(batch, int(k), dtype=torch.int64, device=device), int(k)
    is_array = isinstance(k, list | tuple) or hasattr(k, "dtype")
    wanted = f"an int, or an integer array with one k per instance, e.g. k={n // 2}"
    tensor = as_tensor(k, "k", wanted) if is_array else None
    if tensor is None or tensor.dtype != torch.int64:
        kind = type(k).__name__ if tensor is None else str(tensor.dtype).removeprefix("torch.")
        raise ProblemError(f"k = {k!r} ({kind}): give {wanted}.")
    try:
        tensor = tensor.to(device).expand(batch).clone(memory_format=torch.contiguous_format)
    except RuntimeError:
        raise ProblemError(
            f"k has shape {tuple(tensor.shape)}, which does not broadcast to the batch shape {batch} of W: "
            "give one int, or one per instance."
        ) from None
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high > n:
        raise ProblemError(f"k ranges from {low} to {high}: every k must lie between 0 and n = {n}.")
    return tensor, high


def candidates_mask(protected: Any, batch: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    """Return the unprotected vertices as a bool mask (..., n), possibly an expanded view."""
    if protected is None:
        return torch.ones(n, dtype=torch.bool, device=device).expand(*batch, n)
    if isinstance(protected, set | frozenset | range):
        protected = list(protected)
        if any(isinstance(vertex, bool | np.bool_) for vertex in protected):
            raise ProblemError(f"protected is a set of bools, which has no order: give a list, a bool mask (..., {n}).")
    shapes = " or ".join(map(str, dict.fromkeys([(n,), (*batch, n)])))
    wanted = f"a list of vertices by number, from 0 to {n - 1}, or a bool mask of shape {shapes}"
    tensor = as_tensor(protected, "protected", wanted).to(device)
    if tensor.dtype == torch.bool:
        try:
            if tensor.shape[-1:] != (n,):
                raise RuntimeError
            return (~tensor).expand(*batch, n)
        except RuntimeError:
            raise ProblemError(
                f"protected is a bool mask of shape {tuple(tensor.shape)}: give one entry per vertex, shape {shapes}."
            ) from None
    if tensor.numel() == 0:
        tensor = tensor.to(torch.int64)  # an empty list has no dtype of its own
    if tensor.dtype.is_floating_point:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ProblemError(f"protected has dtype {kind}: give {wanted}.")
    if tensor.ndim != 1:
        raise ProblemError(
            f"protected indices have shape {tuple(tensor.shape)}: give a flat list that holds for every instance, "
            f"or a bool mask of shape {(*batch, n)} for one set per instance."
        )
    if tensor.numel() and not (int(tensor.min()) >= 0 and int(tensor.max()) < n):
        raise ProblemError(
            f"protected holds vertex {int(tensor[(tensor < 0) | (tensor >= n)][0])}: vertices are 0 to {n - 1}."
        )
    _check_distinct(tensor.tolist(), n)
    mask = torch.ones(n, dtype=torch.bool, device=device)
    mask[tensor] = False
    return mask.expand(*batch, n)


def _check_distinct(vertices: list[Any], n: int) -> None:
    if len(set(vertices)) < len(vertices):
        hint = " It looks like a 0/1 mask: pass it as bool." if len(vertices) == n else ""
        raise ProblemError(f"protected names a vertex twice.{hint}")


def check_enough_candidates(k: Tensor, candidates: Tensor, n: int) -> None:
    """Raise unless every instance has k unprotected vertices."""
    room = count_true(candidates)
    if bool((short := k > room).any()):
        at = short.nonzero()[0].tolist()
        have, want = int(room[tuple(at)]), int(k[tuple(at)])
        where = f" in instance {at}" if at else ""
        raise ProblemError(
            f"k = {want}{where}, but only {have} of {n} vertices are unprotected: "
            f"lower k, or protect fewer than {n - want + 1}."
        )


def from_graph(graph: Any, protected: Any) -> tuple[np.ndarray[Any, Any], Any, tuple[Any, ...]]:
    """Return matrix, protected mask and labels of a networkx graph."""
    if graph.is_directed():
        raise ProblemError("the graph is directed: pass graph.to_undirected() if each edge's weight counts once.")
    labels = tuple(graph.nodes)
    place = {label: i for i, label in enumerate(labels)}
    W = np.zeros((len(labels), len(labels)))
    for label, data in graph.nodes(data=True):
        W[place[label], place[label]] += _weight(data, 0, f"node {label!r}")
    for a, b, data in graph.edges(data=True):
        weight = _weight(data, 1, f"edge ({a!r}, {b!r})")
        if a == b:
            W[place[a], place[a]] += weight
        else:
            if weight / 2 * 2 != weight:
                raise ProblemError(
                    f"the weight {weight!r} of edge ({a!r}, {b!r}) is too small to be halved: scale W up."
                )
            W[place[a], place[b]] += weight / 2
            W[place[b], place[a]] += weight / 2
    return W, None if protected is None else _nodes_mask(protected, place), labels


def _nodes_mask(protected: Any, place: dict[Any, int]) -> np.ndarray[Any, Any]:
    """Return protected nodes of a graph as a bool mask; masks of any kind stay masks."""
    if isinstance(protected, np.ndarray) and protected.dtype.kind in "USO" and not np.ma.isMaskedArray(protected):
        protected = protected.tolist()  # names
    elif hasattr(protected, "dtype"):
        wanted = f"a list of nodes of the graph, or a bool mask of shape ({len(place)},)"
        tensor = as_tensor(protected, "protected", wanted).cpu()
        if tensor.dtype == torch.bool:
            return np.asarray(tensor.numpy())
        protected = tensor.tolist()
    if isinstance(protected, str) or _position(protected, place) is not None:
        raise ProblemError(f"protected={protected!r}: give a list of nodes, protected=[{protected!r}].")
    if not isinstance(protected, Iterable):
        raise ProblemError(f"protected={protected!r}: give a list of nodes of the graph, or a bool mask.")
    nodes = list(protected)
    bools = [isinstance(node, bool | np.bool_) for node in nodes]
    if nodes and all(bools) and isinstance(protected, list | tuple):
        if any(isinstance(label, bool) for label in place):
            raise ProblemError(
                f"protected={protected!r}: a mask, or nodes of this graph, which has bools for nodes? "
                "Write np.array(mask, dtype=bool) for a mask, a set for nodes."
            )
        return np.array(nodes, dtype=bool)
    labels = list(place)
    for node, is_bool in zip(nodes, bools, strict=True):
        at = _position(node, place)
        # True equals 1 and would find node 1, but does not name it; nor does 1 name a node called True.
        if at is None or is_bool != isinstance(labels[at], bool | np.bool_):
            raise ProblemError(f"protected names {node!r}, which is not a node of the graph.")
    _check_distinct(nodes, len(place))
    mask = np.zeros(len(place), dtype=bool)
    mask[[place[node] for node in nodes]] = True
    return mask


def _position(node: Any, place: dict[Any, int]) -> int | None:
    try:
        return place.get(node)
    except TypeError:  # a list, for example, cannot be a node
        return None


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
