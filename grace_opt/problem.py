"""`Problem`: one validated instance, or a batch of instances, of minimum-weight k-vertex induced subgraph.

Solvers receive it and may trust it: W is symmetric, finite and float, k is in range, and enough vertices are
unprotected. `solve` builds it for you; build one yourself to solve the same instance many times without repeating the
checks. Source: the problem of GRACE (arXiv 2604.16983, section 3); heaviest-k-subgraph with the sign turned.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arrays import Backend, backend_of, to_tensor, working_dtype
from .errors import ProblemError

#: Symmetry is required to this many units of rounding of the input's dtype, relative to max |W|.
SYMMETRY_EPS = 16


@dataclass(frozen=True, eq=False)
class Problem:
    r"""Choose exactly k of n vertices, none of them protected, with the least :math:`1_S^\top W 1_S`.

    Build it with `Problem.of`, which validates; the constructor itself trusts its caller.

    Attributes
    ----------
    W : Tensor, shape (..., n, n), float32 or float64
        Node weights on the diagonal; edge weights are ``2 W_ij``.
    k : Tensor, shape (...), int64
        How many vertices to choose, per instance.
    candidates : Tensor, shape (..., n), bool
        The vertices that may be chosen: those not protected.
    k_max : int
        The largest k of the batch, known without asking the device.
    integer : bool
        Whether W came as integers, so that objectives differ by whole steps.
    labels : tuple or None
        Names of the vertices, when W came as a networkx graph.
    """

    W: Tensor
    k: Tensor
    candidates: Tensor
    k_max: int
    backend: Backend = field(repr=False)
    integer: bool = False
    labels: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, W: Any, k: Any, *, protected: Any = None, check: bool = True) -> Problem:
        """Validate an instance or a batch.

        Parameters
        ----------
        W : array_like (..., n, n), scipy.sparse matrix, or networkx graph
            Symmetric to ``16 eps(dtype) max|W|``. Node attribute ``weight`` of a graph becomes ``W_ii`` (default 0),
            edge attribute ``weight`` becomes ``2 W_ij`` (default 1), so that f is the induced subgraph's weight.
        k : int or int array broadcastable to (...)
            0 <= k <= number of unprotected vertices.
        protected : array_like, optional
            Vertices that must not be chosen: a bool mask (n,) or (..., n), or integer indices (p,); for a graph, its
            nodes.
        check : bool
            False skips every check that looks at data (finite, symmetric, k and protected in range), for trusted
            callers.

        Raises
        ------
        ProblemError
            Saying what is wrong, where, and what to write instead.

        Examples
        --------
        >>> Problem.of([[2.0, -1.0], [-1.0, 3.0]], 1).n
        2
        """
        labels = None
        if hasattr(W, "adjacency") and hasattr(W, "nodes"):
            W, protected, labels = _from_graph(W, protected)
        backend = backend_of(W, k, protected)
        tensor = to_tensor(W, "W")
        if tensor.ndim < 2 or tensor.shape[-1] != tensor.shape[-2]:
            raise ProblemError(
                f"W has shape {tuple(tensor.shape)}: give a square matrix (n, n) or a batch (..., n, n)."
            )
        if tensor.numel() == 0:
            raise ProblemError(f"W is empty, shape {tuple(tensor.shape)}: give at least one instance with one vertex.")
        *batch, n, _ = tensor.shape
        integer = not _is_float(W)
        if check:
            tensor = _checked_weights(tensor)
        tensor = tensor.to(working_dtype(tensor.dtype))
        k_tensor, k_max = _counts(k, tuple(batch), n, tensor.device)
        candidates = ~_protected_mask(protected, tuple(batch), n, tensor.device)
        if check:
            _check_room(k_tensor, candidates, n)
        return cls(tensor, k_tensor, candidates, k_max, backend, integer, labels)

    @property
    def n(self) -> int:
        """Number of vertices."""
        return self.W.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading dimensions; () for a single instance."""
        return tuple(self.W.shape[:-2])

    @cached_property
    def diagonal(self) -> Tensor:
        """Node weights, shape (..., n)."""
        return self.W.diagonal(dim1=-2, dim2=-1)

    def flatten(self) -> Problem:
        """The same instances with exactly one batch dimension: what batched solvers are given."""
        n = self.n
        return Problem(
            self.W.reshape(-1, n, n),
            self.k.reshape(-1),
            self.candidates.reshape(-1, n),
            self.k_max,
            self.backend,
            self.integer,
            self.labels,
        )

    def instance(self, b: int) -> Problem:
        """Instance `b` of a flattened batch, without a batch dimension."""
        k = self.k[b]
        return Problem(self.W[b], k, self.candidates[b], int(k), self.backend, self.integer, self.labels)


def symmetrize(W: Any) -> Any:
    """The symmetric part (W + Wᵀ) / 2, which has the same objective for every vertex set as W.

    Parameters
    ----------
    W : array_like, shape (..., n, n)

    Returns
    -------
    numpy.ndarray or Tensor
        As W came; integers become float64.

    Examples
    --------
    >>> symmetrize([[0, 2], [0, 0]]).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    tensor = to_tensor(W, "W")
    if tensor.ndim < 2 or tensor.shape[-1] != tensor.shape[-2]:
        raise ProblemError(f"W has shape {tuple(tensor.shape)}: give a square matrix (n, n) or a batch (..., n, n).")
    return backend_of(W).export(tensor / 2 + tensor.mT / 2)


def _is_float(W: Any) -> bool:
    if isinstance(W, Tensor):
        return W.dtype.is_floating_point
    return np.dtype(getattr(W, "dtype", None) or np.asarray(W).dtype).kind == "f"


def _checked_weights(W: Tensor) -> Tensor:
    """W made exactly symmetric, and promoted to float64 where sums would leave float32."""
    if not bool(torch.isfinite(W).all()):
        where = [int(i) for i in (~torch.isfinite(W)).nonzero()[0]]
        raise ProblemError(
            f"W{where} is {W[tuple(where)].item()}: every weight must be finite. To forbid a vertex, use protected=."
        )
    wide = W.to(torch.float64)
    largest = float(wide.abs().max())
    asymmetry = (wide - wide.mT).abs()
    if (worst := float(asymmetry.max())) > (allowed := SYMMETRY_EPS * torch.finfo(W.dtype).eps * largest):
        i = [int(v) for v in (asymmetry == worst).nonzero()[0]]
        raise ProblemError(
            f"W is not symmetric: |W{i} - W{[*i[:-2], i[-1], i[-2]]}| = {worst:.3g}, allowed {allowed:.3g} "
            f"({SYMMETRY_EPS} eps max|W|). If the symmetric part is meant, pass grace_opt.symmetrize(W)."
        )
    n = W.shape[-1]
    if largest * n * n > torch.finfo(torch.float64).max / 8:
        raise ProblemError(
            f"max|W| = {largest:.3g}: sums of weights leave float64. Divide W by {largest:.3g}; f scales with it."
        )
    limits = torch.finfo(torch.float32)
    fits = largest * n * n < limits.max / 8 and (largest == 0 or largest > limits.tiny / limits.eps)
    dtype = working_dtype(W.dtype) if fits else torch.float64
    # The mean of W and its transpose is exactly symmetric; where W already was, nothing changes.
    return ((wide + wide.mT) / 2).to(dtype) if worst else W.to(dtype)


def _counts(k: Any, batch: tuple[int, ...], n: int, device: torch.device) -> tuple[Tensor, int]:
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


def _protected_mask(protected: Any, batch: tuple[int, ...], n: int, device: torch.device) -> Tensor:
    if protected is None:
        return torch.zeros(*batch, n, dtype=torch.bool, device=device)
    if isinstance(protected, Tensor):
        tensor = protected.detach()
    else:
        array = np.asarray(list(protected) if isinstance(protected, set | frozenset | range) else protected)
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
            return tensor.expand(*batch, n)
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
    mask = torch.zeros(n, dtype=torch.bool, device=device)
    mask[tensor.to(torch.int64)] = True
    return mask.expand(*batch, n)


def _check_room(k: Tensor, candidates: Tensor, n: int) -> None:
    room = candidates.sum(-1)
    if bool((short := k > room).any()):
        at = short.nonzero()[0].tolist()
        have, want = int(room[tuple(at)]), int(k[tuple(at)])
        where = f" in instance {at}" if at else ""
        raise ProblemError(
            f"k = {want}{where}, but only {have} of {n} vertices are unprotected: "
            f"lower k, or protect fewer than {n - want + 1}."
        )


def _from_graph(graph: Any, protected: Any) -> tuple[np.ndarray[Any, Any], Any, tuple[Any, ...]]:
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
