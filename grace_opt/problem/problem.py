"""`Problem`: a validated instance, or a batch of instances, of the minimum-weight k-vertex induced subgraph problem.

Solvers receive it and may trust it: W is symmetric, finite and float, k is in range, and enough vertices are
unprotected. `solve` builds it for you; build one yourself to solve the same instance many times without repeating the
checks. Source: the problem of GRACE (arXiv 2604.16983, section 3); heaviest k-subgraph with the opposite sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Never

import torch
from torch import Tensor

from .._util.array_like import as_tensor
from .._util.arrays import Backend, backend_of, to_float_tensor, to_floats, working_dtype
from .._util.inputs import check_enough_candidates, k_per_instance
from .._util.matrices import (
    UNITS_OF_LARGEST,
    asymmetric,
    checked_labels,
    from_condensed,
    lost_half_error,
    not_finite_error,
    place_of,
    symmetry_rtol,
    with_labels,
)
from .._util.names import refuse_unknown
from .._util.sparse_rows import from_torch, rounding_of
from .._util.vertices import vertex_mask
from ..errors import ProblemError
from ..kernels.solve.extremes import extremes
from .constraints import NAMES as CONSTRAINTS
from .constraints import Constraints
from .dense import DenseWeights
from .sparse import SparseWeights, symmetric_part
from .weights import Weights

#: Sparse W stays sparse from this number of vertices on, if at most this share of its entries is stored.
SPARSE_FROM, SPARSE_SHARE = 1000, 0.1
#: Number of entries that are compared with their mirror images at a time.
SYMMETRY_BLOCK = 1 << 22
OF_SOLVE = "maximize=, required= and constraints belong to solve and compare: solve(Problem.of(W, k), required=[...])."


@dataclass(frozen=True, eq=False)
class Problem:
    r"""Choose exactly k of n vertices, none of them protected, with the least :math:`1_S^\top W 1_S`.

    Build it with `Problem.of`, which validates; the constructor itself trusts its caller.

    Attributes
    ----------
    weights : Weights
        W, in the form that it has. Methods registered with ``forms=`` also get it in these forms; all others get a
        tensor, `W`.
    k : Tensor, shape (...), int64
        Number of vertices to choose, per instance.
    candidates : Tensor, shape (..., n), bool
        The vertices that may be chosen: those not protected.
    k_max : int
        The largest k of the batch, on the host: reading it does not wait for the device.
    backend : Backend
        Whether W was given as numpy or torch, which answers then are.
    integer : bool
        Whether W was given as integers; objectives then differ by whole steps.
    labels : tuple or None
        Names of the vertices, if W was given as a networkx graph or a pandas DataFrame, or with ``labels=``.
    required : Tensor, shape (..., n), bool, or None
        Vertices that ``solve(required=)`` chose before the solver runs: they are no candidates, and W and k are those
        of the rest. `Problem.of` never sets it.
    constraints : Constraints or None
        What a choice has to keep beside its size; of a single instance, and only methods registered with
        ``constraints=True`` get it. Without the required vertices, as W and k are. `Problem.of` never sets it.
    """

    weights: Weights
    k: Tensor
    candidates: Tensor
    k_max: int
    backend: Backend = field(repr=False)
    integer: bool = False
    labels: tuple[Any, ...] | None = None
    required: Tensor | None = None
    constraints: Constraints | None = None

    @classmethod
    def of(
        cls, W: Any, k: Any, *, protected: Any = None, labels: Any = None, check: bool = True, **unknown: Never
    ) -> Problem:
        """Validate an instance or a batch.

        Parameters
        ----------
        W : array_like (..., n, n), sparse matrix, DataFrame, networkx graph, FactoredWeights, or distances
            Each instance is symmetric, integers exactly, others to ``256 eps(dtype) sqrt(m_i m_j)`` (half precision: 16
            eps) and ``16 eps max|W|``, with ``m_i`` the largest ``|W_ij|`` of vertex i. The rows and columns of a
            DataFrame have equal labels; a list of DataFrames with the same labels in the same order is a batch. For a
            graph, the node attribute ``weight`` becomes ``W_ii`` (default 0) and the edge attribute ``weight`` becomes
            ``2 W_ij`` (default 1); f is then the weight of the induced subgraph. A vector is the upper triangle without
            the diagonal, row by row, as scipy's ``pdist`` returns it; the diagonal is 0.
        k : int or int array broadcastable to (...)
            0 <= k <= number of unprotected vertices.
        protected : array_like, optional
            Never chosen: a bool mask (n,) or (..., n), or integer indices (p,); for a graph or a DataFrame, a bool mask
            or a list of nodes or labels.
        labels : sequence of n names, optional
            Names of the vertices of a matrix without any: `protected` then takes names, and `Solution.labels` has them.
        check : bool
            False skips the checks that read W (finite, symmetric), and whether enough vertices are unprotected; for
            trusted callers.
        **unknown
            Refused, with the argument that may be meant.

        Raises
        ------
        ProblemError, OptionError
            The message says what is wrong, where, and what to write instead.

        Examples
        --------
        >>> Problem.of([[2.0, -1.0], [-1.0, 3.0]], 1).n
        2
        """
        refuse_unknown(cls.of, unknown, dict.fromkeys(("required", "maximize", *CONSTRAINTS), OF_SOLVE))
        W, own = with_labels(W)
        if own is not None and labels is not None:
            raise ProblemError("W is a graph or a DataFrame, which has labels of its own: leave labels= out.")
        arrays = W.arrays if isinstance(W, Weights) else (W,)
        backend = backend_of(*arrays, k, protected if own is None else None)
        if isinstance(W, list | tuple) and any(hasattr(one, "tocsr") for one in W):
            raise ProblemError("W is a list of sparse matrices: solve them one by one.")
        if _is_sparse_tensor(W) and stays_sparse(min(W.shape), W._nnz()):
            W = from_torch(W)
        if isinstance(W, Weights) or _stays_sparse(W):
            weights: Weights
            weights, integer = (W, W.integer) if isinstance(W, Weights) else SparseWeights.of(W)
            labels = own if labels is None else checked_labels(labels, weights.n)
            return cls._with(weights, k, protected, labels, backend, integer, check)
        # Sums of entries given twice are doubles, and no more symmetric than these entries were.
        spread = isinstance(W, Tensor) and W.layout != torch.strided
        rounding = rounding_of(W) if spread or hasattr(W, "tocsr") else None
        given = as_tensor(W, "W")
        if given.ndim == 1:
            given = from_condensed(given)
        integer, tensor = not given.dtype.is_floating_point, to_floats(given, "W")
        rounding = 0.0 if integer else rounding
        _check_square(tensor)
        if tensor.numel() == 0:
            raise ProblemError(f"W is empty, shape {tuple(tensor.shape)}: give at least one instance with one vertex.")
        labels = own if labels is None else checked_labels(labels, tensor.shape[-1])
        if check:
            weights = _checked_weights(tensor, labels, rounding)
        else:
            weights = DenseWeights(tensor.to(working_dtype(tensor.dtype)))
        return cls._with(weights, k, protected, labels, backend, integer, check)

    @classmethod
    def _with(
        cls, W: Weights, k: Any, protected: Any, labels: Any, backend: Backend, integer: bool, check: bool
    ) -> Problem:
        """The problem of a checked W."""
        batch, n = W.batch, W.n
        k_tensor, k_max = k_per_instance(k, batch, n, W.device)
        blocked = vertex_mask(protected, "protected", labels, batch, n, W.device)
        candidates = (~blocked).expand(*batch, n)
        if check:
            check_enough_candidates(k_tensor, candidates, n)
        return cls(W, k_tensor, candidates, k_max, backend, integer, labels)

    @property
    def W(self) -> Tensor:  # noqa: N802
        """Node weights on the diagonal, edge weights ``2 W_ij``: (..., n, n), float32 or float64.

        Raises
        ------
        ProblemError
            If W is in another form, which only methods registered with ``forms=`` see: they read `weights`.
        """
        return self.weights.tensor

    def dense(self, wanted_by: str) -> Problem:
        """Return the same problem with W as a tensor.

        Raises
        ------
        ProblemError
            If that takes more memory than is free; the message names `wanted_by`, and says how much.
        """
        if isinstance(self.weights, DenseWeights):
            return self
        return replace(self, weights=DenseWeights(self.weights.dense(wanted_by)))

    def as_matrix(self, name: str) -> Problem:
        """Return the same problem with W as a tensor, for the bound of this name, which holds for W as it is.

        Raises
        ------
        ProblemError
            As in `dense`, or if W would be rounded.
        """
        if self.weights.is_rounded:
            raise ProblemError(
                f"{name} reads W as a matrix, and W in its {self.weights.form} form would be rounded: use "
                "grace_opt.bounds.certificate, which allows for it."
            )
        return self.dense(name)

    @property
    def n(self) -> int:
        """Number of vertices."""
        return self.weights.n

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading dimensions; () for a single instance."""
        return self.weights.batch

    @cached_property
    def diagonal(self) -> Tensor:
        """Node weights, shape (..., n)."""
        return self.weights.diagonal()

    @cached_property
    def step(self) -> Tensor:
        """A number that divides f of every choice, shape (...), float64: 0 where there is none, as of real weights.

        Of whole numbers, or these times a power of two, the largest: 2 for a graph, as f holds every edge twice.
        """
        return self.weights.step(self.candidates)

    def with_size(self, k: int) -> Problem:
        """Return the same single instance for another size."""
        return replace(self, k=torch.full_like(self.k, k), k_max=k)

    def flatten(self) -> Problem:
        """Return the same instances with exactly one batch dimension, as batched solvers get them."""
        n = self.n
        required = None if self.required is None else self.required.reshape(-1, n)
        return replace(
            self,
            weights=self.weights.reshape(-1, n, n),
            k=self.k.reshape(-1),
            candidates=self.candidates.reshape(-1, n),
            required=required,
        )

    def instance(self, b: int) -> Problem:
        """Instance `b` of a flattened batch, without a batch dimension."""
        k, required = self.k[b], None if self.required is None else self.required[b]
        return self._part(b, k, int(k), required)

    def instances(self, rows: Tensor) -> Problem:
        """Some instances of a flattened batch, as a flattened batch."""
        k, required = self.k[rows], None if self.required is None else self.required[rows]
        return self._part(rows, k, int(k.max()) if len(rows) else 0, required)

    def _part(self, at: Any, k: Tensor, k_max: int, required: Tensor | None) -> Problem:
        """The instances there, with their steps if these are known."""
        weights, candidates = self.weights[at], self.candidates[at]
        part = replace(self, weights=weights, k=k, candidates=candidates, k_max=k_max, required=required)
        if "step" in self.__dict__:
            part.__dict__["step"] = self.step[at]
        return part


def _stays_sparse(W: Any) -> bool:
    """Whether it is a scipy.sparse matrix, many vertices with few edges."""
    if not hasattr(W, "tocsr"):
        return False
    return stays_sparse(min(W.shape), W.nnz)


def _is_sparse_tensor(W: Any) -> bool:
    """Whether it is a tensor (n, n) in one of torch's sparse layouts, without dense dimensions."""
    return isinstance(W, Tensor) and W.layout != torch.strided and W.ndim == 2 and W.dense_dim() == 0


def stays_sparse(n: int, entries: int) -> bool:
    """Whether W of n vertices with so many stored entries is better kept sparse."""
    return n >= SPARSE_FROM and entries <= SPARSE_SHARE * n**2


def symmetrize(W: Any) -> Any:
    """Return the symmetric part (W + Wᵀ) / 2, which has the same objective for every vertex set as W.

    Parameters
    ----------
    W : array_like, shape (..., n, n), or scipy.sparse matrix (n, n)

    Returns
    -------
    numpy.ndarray, Tensor or scipy.sparse.csr_array
        As W came; integers, and all sparse W, become float64.

    Raises
    ------
    ProblemError
        If W is not square, or two entries are too small to be halved.

    Examples
    --------
    >>> symmetrize([[0, 2], [0, 0]]).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    if hasattr(W, "tocsr"):
        return symmetric_part(W)
    tensor = to_float_tensor(W, "W")
    _check_square(tensor)
    total = tensor + tensor.mT
    mean = _mean(tensor)
    if bool((lost := total.isfinite() & (mean * 2 != total)).any()):
        raise lost_half_error(lost.nonzero()[0].tolist(), float(total[lost][0]))
    return backend_of(W).export(mean)


def _check_square(tensor: Tensor) -> None:
    if tensor.ndim < 2 or tensor.shape[-1] != tensor.shape[-2]:
        length = tensor.shape[-1] if tensor.ndim == 2 else 0
        n = (1 + math.isqrt(1 + 8 * length)) // 2
        hint = (
            f" If each row holds the {length} distances of scipy's pdist for n = {n}, write "
            "np.stack([squareform(row) for row in W]), with scipy.spatial.distance.squareform."
            if length > 1 and n * (n - 1) // 2 == length
            else ""
        )
        raise ProblemError(
            f"W has shape {tuple(tensor.shape)}: give a square matrix (n, n) or a batch (..., n, n).{hint}"
        )


def _mean(tensor: Tensor) -> Tensor:
    """The mean of W and its transpose, without over- or underflow: exactly symmetric, and W itself if W is."""
    total = tensor + tensor.mT
    return torch.where(total.isfinite(), total / 2, tensor / 2 + tensor.mT / 2)


def _refuse_asymmetric(W: Tensor, labels: tuple[Any, ...] | None, eps: float) -> None:
    """Raise ProblemError where W and its transpose differ by more than rounding; some rows at a time."""
    n = W.shape[-1]
    sizes = torch.stack([W.amax(-1), -W.amin(-1), W.amax(-2), -W.amin(-2)]).amax(0)
    roots = sizes.to(torch.float64).sqrt()
    largest = sizes.to(torch.float64).amax(-1)
    block = max(1, SYMMETRY_BLOCK * n // W.numel())
    for first in range(0, n, block):
        these = slice(first, first + block)
        apart = (W[..., these, :].to(torch.float64) - W[..., these].mT.to(torch.float64)).abs()
        # Divide rather than multiply: products may underflow. Where nothing is allowed, 0 / 0 is no excess.
        skew = apart / symmetry_rtol(eps) / roots[..., these, None] > roots[..., None, :]
        skew |= apart / (UNITS_OF_LARGEST * eps) > largest[..., None, None]
        if bool(skew.any()):
            *at, row, j = skew.nonzero()[0].tolist()
            i, difference = first + row, float(apart[(*at, row, j)])
            of_both = float(roots[(*at, i)]), float(roots[(*at, j)])
            raise asymmetric([*at, i, j], difference, eps, (*of_both, float(largest[tuple(at)])), labels)


def _checked_weights(W: Tensor, labels: tuple[Any, ...] | None, rounding: float | None) -> DenseWeights:
    """W, checked and made exactly symmetric; in float64 if sums would leave the range of float32."""
    n, eps = W.shape[-1], torch.finfo(W.dtype).eps if rounding is None else rounding
    finite, largest, worst = extremes(W)
    if not bool(finite.all()):
        where = [int(i) for i in (~torch.isfinite(W)).nonzero()[0]]
        raise not_finite_error(place_of(where, labels), float(W[tuple(where)]))
    if bool(worst.any()):
        _refuse_asymmetric(W, labels, eps)
    if bool((largest > torch.finfo(torch.float64).max / 8 / n**2).any()):
        size = float(largest.max())
        raise ProblemError(
            f"max|W| = {size:.3g}: sums of weights overflow float64. Divide W by {size:.3g}; f scales with it."
        )
    limits = torch.finfo(torch.float32)
    fits = (largest < limits.max / 8 / n**2) & ((largest == 0) | (largest > limits.tiny / limits.eps))
    dtype = working_dtype(W.dtype) if bool(fits.all()) else torch.float64
    if bool(worst.any()):
        return DenseWeights(_mean(W.to(torch.float64)).to(dtype))
    return DenseWeights(W.to(dtype), largest)
