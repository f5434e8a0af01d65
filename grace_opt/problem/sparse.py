"""`SparseWeights`: W by its edges, in memory proportional to their number.

When: W is a scipy.sparse matrix or a networkx graph with many vertices and few edges; `Problem.of` decides. Edges lie
in both directions, row by row (CSR), as scipy keeps them; node weights are apart. Always one instance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._util.array_like import wrong_dtype_error
from .._util.matrices import UNITS_OF_LARGEST, asymmetric, lost_half_error, not_finite_error, symmetry_rtol
from .._util.sparse_rows import by_rows, refuse_too_large, rounding_of
from ..errors import ProblemError
from ..kernels.solve.objective import is_doubtful
from ..kernels.solve.sparse.forms import Graph
from ..kernels.solve.sparse.greedy import path_of
from .steps import common_divisor
from .weights import Weights

#: A scipy.sparse.csr_array; scipy ships no types.
Edges: TypeAlias = Any


class SparseWeights(Weights):
    """W of one instance as edges and node weights, in float64.

    Parameters
    ----------
    edges : scipy.sparse.csr_array (n, n), float64
        W without its diagonal: symmetric, sorted, without duplicates and explicit zeros. Trusted.
    nodes : Tensor (n,), float64
        The diagonal.
    batch : tuple of int
        () or (1,): a batch of one, as solvers of batches get it.

    Examples
    --------
    >>> import scipy.sparse
    >>> weights, integer = SparseWeights.of(scipy.sparse.csr_array([[1.0, 2.0], [2.0, 0.0]]))
    >>> weights.objective(torch.tensor([True, True])), weights.numel(), integer
    (tensor(5., dtype=torch.float64), 4, False)
    """

    form = "sparse"

    def __init__(self, edges: Edges, nodes: Tensor, batch: tuple[int, ...] = ()) -> None:
        self.edges, self.nodes, self.batch = edges, nodes, batch
        self._known: dict[str, Any] = {}  # W as compiled loops take it, and the sums of the last mask

    @classmethod
    def of(cls, W: Any) -> tuple[Self, bool]:
        """Check a scipy.sparse matrix, and take it over; also whether it holds integers.

        Entries given twice are added, without overflow; zeros are left out.

        Raises
        ------
        ProblemError
            As for a matrix: the message says what is wrong, where, and what to write instead.
        """
        whole, integer = _checked(W)
        _check_finite(whole)
        nodes = whole.diagonal()
        edges = _symmetric(_without_diagonal(whole), nodes, rounding_of(W))
        return cls(edges, torch.from_numpy(nodes)), integer

    @classmethod
    def small(cls) -> Self:
        """Return W of 24 vertices, for which every part of a search runs."""
        from scipy.sparse import csr_array

        place = np.arange(24.0)
        return cls.of(csr_array(np.cos(7 * place[:, None] * place)))[0].reshape(1, 24, 24)

    @property
    def n(self) -> int:
        return int(self.edges.shape[0])

    @property
    def device(self) -> torch.device:
        return self.nodes.device

    def numel(self) -> int:
        """Return the number of stored entries, each edge twice."""
        return int(self.edges.nnz) + self.n

    def diagonal(self) -> Tensor:
        return self.nodes.expand(*self.batch, self.n)

    def with_diagonal(self, diagonal: Tensor) -> Self:
        """Return the same edges with these node weights."""
        return type(self)(self.edges, diagonal.reshape(self.n), self.batch)

    def negated(self) -> Self:
        return type(self)(-self.edges, 0.0 - self.nodes, self.batch)

    def largest(self) -> Tensor:
        """Return the largest absolute weight."""
        found = max(float(np.abs(part).max(initial=0.0)) for part in (self.edges.data, self.nodes.numpy()))
        return torch.full(self.batch, found, dtype=torch.float64, device=self.device)

    def between(self, some: Tensor, others: Tensor) -> Edges:
        """Return the edges between two sets, masks (n,), as a matrix by rows."""
        rows, columns = (mask.reshape(self.n).numpy().nonzero()[0] for mask in (some, others))
        return self.edges[rows][:, columns]

    def without(self, vertices: Tensor) -> Self:
        """Return W without the edges and weights of these vertices."""
        from scipy.sparse import csr_array, diags_array

        left = ~vertices.reshape(self.n)
        keep = diags_array(left.numpy().astype(np.float64))
        edges = csr_array(keep @ self.edges @ keep)
        edges.eliminate_zeros()
        edges.sort_indices()
        return type(self)(edges, torch.where(left, self.nodes, 0.0), self.batch)

    def times(self, x: Tensor) -> Tensor:
        """Return W x."""
        flat = x.reshape(self.n).to(torch.float64)
        return (torch.from_numpy(self.edges @ flat.numpy()) + self.nodes * flat).reshape(x.shape)

    def graph(self, keep: Tensor | None = None) -> Graph:
        """Return W, or that of some of its vertices, a mask (n,), as compiled loops take it."""
        if keep is not None and not bool(keep.all()):
            inside = keep.reshape(self.n).numpy().nonzero()[0]
            return _graph_of(self.edges[inside][:, inside], np.ascontiguousarray(self.nodes.numpy()[inside]))
        if "graph" not in self._known:
            self._known["graph"] = _graph_of(self.edges, self.nodes.numpy())
        graph: Graph = self._known["graph"]
        return graph

    def objective(self, mask: Tensor) -> Tensor:
        """Return f, exact to the last digit; O(edges)."""
        return self._each(mask, self._exact)

    def magnitude(self, mask: Tensor) -> Tensor:
        """Return the sum of |W_ij| over the chosen vertices."""
        return self._each(mask, lambda one: self._sums(one)[2])

    def step(self, candidates: Tensor) -> Tensor:
        alive = candidates.reshape(self.n)
        found = common_divisor(self.nodes[alive], 2 * self.between(alive, alive).data)
        return torch.full(self.batch, found, dtype=torch.float64, device=self.device)

    def path(self, order: Tensor) -> Tensor:
        return path_of(self.graph(), order[order >= 0][None])

    def _sums(self, mask: npt.NDArray[np.bool_]) -> tuple[float, float, float]:
        """f, what its rounding left, and the sum of absolute weights."""
        from ..kernels.solve.sparse.cpu.sums import objective

        last, *known = self._known.get("sums", (None,))
        if last is None or not np.array_equal(last, mask):
            known = [float(each) for each in objective(self.graph(), mask)]
            self._known["sums"] = (mask.copy(), *known)
        value, rest, size = known
        return value, rest, size

    def _exact(self, mask: npt.NDArray[np.bool_]) -> float:
        found = self._sums(mask)
        if not is_doubtful(*torch.tensor(found, dtype=torch.float64, device="cpu")):
            return found[0]
        inside = mask.nonzero()[0]
        return math.fsum([*self.edges[inside][:, inside].data.tolist(), *self.nodes.numpy()[inside].tolist()])

    def _each(self, mask: Tensor, function: Callable[[npt.NDArray[np.bool_]], float]) -> Tensor:
        """Return a function of every mask (..., n)."""
        rows = np.ascontiguousarray(mask.reshape(-1, self.n).cpu().numpy())
        values = torch.tensor([function(row) for row in rows], dtype=torch.float64, device=mask.device)
        return values.reshape(mask.shape[:-1])

    def reshape(self, *shape: int) -> Self:
        """Return the instance as a batch of one, or without a batch dimension."""
        return self._same((1,) * (len(shape) - 2))

    def __getitem__(self, at: Any) -> Self:
        """Return the instance: a batch has one."""
        return self._same(() if isinstance(at, int) else (1,))

    def _same(self, batch: tuple[int, ...]) -> Self:
        same = type(self)(self.edges, self.nodes, batch)
        same._known = self._known
        return same

    def clone(self) -> Self:
        return type(self)(self.edges.copy(), self.nodes.clone(), self.batch)

    def numbers(self) -> list[Tensor]:
        """Return the edges' three arrays, and the node weights."""
        edges = self.edges
        return [*map(torch.from_numpy, (edges.data, edges.indices, edges.indptr)), self.nodes]

    def _to_dense(self) -> Tensor:
        W = torch.from_numpy(self.edges.toarray())
        W.diagonal().copy_(self.nodes)
        return W.expand(*self.shape)


def _graph_of(edges: Edges, nodes: npt.NDArray[np.float64]) -> Graph:
    return Graph(edges.indptr.astype(np.int64), edges.indices.astype(np.int32, copy=False), edges.data, nodes)


def symmetric_part(W: Any) -> Edges:
    """Return (W + Wᵀ) / 2 of a scipy.sparse matrix, in float64; raises `ProblemError` if that loses something."""
    whole, _ = _checked(W)
    with np.errstate(over="ignore"):
        total = (whole + whole.T).tocoo()
    if not np.isfinite(total.data).all():
        return (whole / 2 + whole.T / 2).tocsr()
    if len(lost := np.flatnonzero(total.data / 2 * 2 != total.data)):
        raise lost_half_error([int(total.row[lost[0]]), int(total.col[lost[0]])], float(total.data[lost[0]]))
    return (total / 2).tocsr()


def _checked(W: Any) -> tuple[Edges, bool]:
    """W by rows in float64, and whether it was given as integers; perhaps not finite or symmetric."""
    if len(W.shape) != 2 or W.shape[0] != W.shape[1]:
        raise ProblemError(f"W has shape {tuple(W.shape)}: give a square matrix (n, n).")
    dtype = np.dtype(W.dtype)
    if dtype.kind not in "iuf":
        raise wrong_dtype_error("W", dtype)
    whole = by_rows(W)
    if dtype.kind in "iu":
        refuse_too_large(whole.data, "W")
    with np.errstate(over="ignore"):  # of longer floats; infinite entries are named later
        whole = type(whole)((whole.data.astype(np.float64, copy=False), whole.indices, whole.indptr), shape=W.shape)
    return whole, dtype.kind in "iu"


def _check_finite(whole: Edges) -> None:
    if not np.isfinite(whole.data).all():
        at = int(np.flatnonzero(~np.isfinite(whole.data))[0])
        i, j = int(np.searchsorted(whole.indptr, at, "right")) - 1, int(whole.indices[at])
        raise not_finite_error(f"W[{i}, {j}]", float(whole.data[at]))


def _without_diagonal(whole: Edges) -> Edges:
    """The entries off the diagonal that are not zero; `whole` itself if it has no others."""
    own = np.repeat(np.arange(whole.shape[0], dtype=whole.indices.dtype), np.diff(whole.indptr))
    keep = (own != whole.indices) & (whole.data != 0)
    if keep.all():
        return whole
    before = np.concatenate([[0], np.cumsum(np.bincount(own[keep], minlength=whole.shape[0]))])
    return type(whole)((whole.data[keep], whole.indices[keep], before.astype(own.dtype)), shape=whole.shape)


def _symmetric(edges: Edges, nodes: npt.NDArray[np.float64], eps: float) -> Edges:
    """W's edges, made exactly symmetric; raises ProblemError if they are not so up to rounding, or too large."""
    n = edges.shape[0]
    largest = max(float(np.abs(part).max(initial=0.0)) for part in (edges.data, nodes))
    other = edges.T.tocsr()
    other.sort_indices()
    same = np.array_equal(edges.indptr, other.indptr) and np.array_equal(edges.indices, other.indices)
    if not (same and np.array_equal(edges.data, other.data)):
        skew, sizes = (edges - other).tocoo(), np.abs(nodes)
        for part in (edges, other):
            sizes = np.maximum(sizes, abs(part).max(axis=1).toarray().ravel())
        roots, (i, j) = np.sqrt(sizes), skew.coords
        apart = np.abs(skew.data)
        with np.errstate(all="ignore"):  # of integers, nothing is allowed: x / 0 is infinite, and 0 / 0 no excess
            beyond = apart / (UNITS_OF_LARGEST * eps) > largest
            wrong = np.flatnonzero(beyond | (apart / symmetry_rtol(eps) / roots[i] > roots[j]))
        if len(wrong):
            v, w, difference = int(i[wrong[0]]), int(j[wrong[0]]), float(apart[wrong[0]])
            raise asymmetric([v, w], difference, eps, (float(roots[v]), float(roots[w]), largest), None)
        edges = type(edges)(edges / 2 + other / 2)
        edges.sort_indices()
    if largest > np.finfo(np.float64).max / 8 / n**2:
        raise ProblemError(
            f"max|W| = {largest:.3g}: sums of weights overflow float64. Divide W by {largest:.3g}; f scales with it."
        )
    return edges
