"""What users give beside W, made uniform: k per instance, protected vertices as a mask, networkx graphs as matrices.

`Problem.of` calls these; every way to get them wrong has its own message. Source: ours.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arrays import count
from .errors import ProblemError


def counts(k: Any, batch: tuple[int, ...], n: int, device: torch.device) -> tuple[Tensor, int]:
    """One k per instance, (...) int64, and the largest of them."""
    if isinstance(k, numbers.Integral) and not isinstance(k, bool | np.bool_):
        if not 0 <= int(k) <= n:
            raise ProblemError(f"k = {int(k)}: must lie between 0 and n = {n}.")
        return torch.full(batch, int(k), dtype=torch.int64, device=device), int(k)
    tensor = k.detach() if isinstance(k, Tensor) else torch.as_tensor(np.asarray(k)) if _is_array(k) else None
    if tensor is None or tensor.dtype.is_floating_point or tensor.is_complex() or tensor.dtype == torch.bool:
        kind = type(k).__name__ if tensor is None else str(tensor.dtype).removeprefix("torch.")
        raise ProblemError(
            f"k = {k!r} ({kind}): give an int, or an integer array with one k per instance, e.g. k={n // 2}."
        )
    try:
        tensor = tensor.to(device=device, dtype=torch.int64).expand(batch).contiguous()
    except RuntimeError:
        raise ProblemError(
            f"k has shape {tuple(tensor.shape)}, which does not broadcast to the batch shape {batch} of W: "
            "give one int, or one per instance."
        ) from None
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high > n:
        raise ProblemError(f"k ranges from {low} to {high}: every k must lie between 0 and n = {n}.")
    return tensor, high


def _is_array(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "iufcb"
    return isinstance(value, list | tuple) and np.asarray(value).dtype.kind in "iufcb"


def candidates_mask(protected: Any, batch: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    """The vertices that are not protected as a bool mask (..., n), which may be an expanded one."""
    if protected is None:
        return torch.ones(n, dtype=torch.bool, device=device).expand(*batch, n)
    if isinstance(protected, Tensor):
        tensor = protected.detach()
    else:
        try:
            array = np.asarray(list(protected) if isinstance(protected, set | frozenset | range) else protected)
        except ValueError:
            raise ProblemError(
                f"protected is a ragged sequence: give a bool mask of shape {(*batch, n)} for one set per instance."
            ) from None
        if array.size == 0:
            array = array.astype(np.int64)
        if array.dtype.kind not in "iub":
            raise ProblemError(
                f"protected has dtype {array.dtype}: give a bool mask (..., {n}) or integer vertex indices."
            )
        tensor = torch.as_tensor(array.astype(np.int64) if array.dtype.kind in "iu" else array)
    tensor = tensor.to(device)
    if tensor.dtype == torch.bool:
        try:
            if tensor.shape[-1:] != (n,):
                raise RuntimeError
            return (~tensor).expand(*batch, n)
        except RuntimeError:
            raise ProblemError(
                f"protected is a bool mask of shape {tuple(tensor.shape)}: expected ({n},) or {(*batch, n)}."
            ) from None
    if tensor.dtype.is_floating_point or tensor.is_complex():
        raise ProblemError(
            f"protected has dtype {tensor.dtype}: give a bool mask (..., {n}) or integer vertex indices."
        )
    if tensor.ndim != 1:
        raise ProblemError(
            f"protected indices have shape {tuple(tensor.shape)}: give a flat list that holds for every instance, "
            f"or a bool mask of shape {(*batch, n)} for one set per instance."
        )
    if tensor.numel() and not (int(tensor.min()) >= 0 and int(tensor.max()) < n):
        raise ProblemError(
            f"protected holds vertex {int(tensor[(tensor < 0) | (tensor >= n)][0])}: vertices are 0 to {n - 1}."
        )
    if len(set(tensor.tolist())) < tensor.numel():
        hint = " It looks like a 0/1 mask: pass it as bool." if tensor.numel() == n else ""
        raise ProblemError(f"protected names a vertex twice.{hint}")
    mask = torch.ones(n, dtype=torch.bool, device=device)
    mask[tensor.to(torch.int64)] = False
    return mask.expand(*batch, n)


def check_room(k: Tensor, candidates: Tensor, n: int) -> None:
    """Raise unless every instance has k unprotected vertices."""
    room = count(candidates)
    if bool((short := k > room).any()):
        at = short.nonzero()[0].tolist()
        have, want = int(room[tuple(at)]), int(k[tuple(at)])
        where = f" in instance {at}" if at else ""
        raise ProblemError(
            f"k = {want}{where}, but only {have} of {n} vertices are unprotected: "
            f"lower k, or protect fewer than {n - want + 1}."
        )


def from_graph(graph: Any, protected: Any) -> tuple[np.ndarray[Any, Any], Any, tuple[Any, ...]]:
    """Matrix, protected mask and labels of a networkx graph."""
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
            W[place[a], place[b]] += weight / 2
            W[place[b], place[a]] += weight / 2
    if protected is not None and not (isinstance(protected, np.ndarray) and protected.dtype == bool):
        unknown = [node for node in protected if node not in place]
        if unknown:
            raise ProblemError(f"protected names {unknown[0]!r}, which is no node of the graph.")
        mask = np.zeros(len(labels), dtype=bool)
        mask[[place[node] for node in protected]] = True
        protected = mask
    return W, protected, labels


def _weight(data: Any, default: float, where: str) -> float:
    value = data.get("weight", default)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ProblemError(f"the weight of {where} is {value!r}: give a real number.")
    return float(value)
