"""`DenseWeights`: W as a tensor (..., n, n), float32 or float64, and what is known of it, so that it is weighed once.

When: W is an array, and for methods that take no other form. The last f and the largest entries are remembered:
`Problem.flatten` begins anew with every call, so that an array which the user changes in between is read again.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.solve.greedy import cost_path
from ..kernels.solve.objective import Sums, exact_sums
from .steps import common_divisor
from .weights import Weights


class DenseWeights(Weights):
    """W as a tensor.

    Parameters
    ----------
    tensor : Tensor (..., n, n), float32 or float64
        Symmetric and finite. Trusted.
    largest : Tensor, float64, optional
        max |W_ij| of each instance, if known.

    Examples
    --------
    >>> W = DenseWeights(torch.tensor([[1.0, -2.0], [-2.0, 0.0]]))
    >>> W.objective(torch.tensor([True, True])), W.largest()
    (tensor(-3., dtype=torch.float64), tensor(2., dtype=torch.float64))
    """

    form = "dense"

    def __init__(self, tensor: Tensor, largest: Tensor | None = None) -> None:
        self._tensor, self._largest = tensor, largest
        self.batch, self.dtype = tuple(tensor.shape[:-2]), tensor.dtype
        self._last: tuple[Tensor, Sums] | None = None

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    @property
    def n(self) -> int:
        return self._tensor.shape[-1]

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def numel(self) -> int:
        return self._tensor.numel()

    def diagonal(self) -> Tensor:
        """Return the node weights (..., n), in W's precision."""
        return self._tensor.diagonal(dim1=-2, dim2=-1)

    def negated(self) -> Self:
        """Return 0 - W, and not -W, which would hold negative zeros."""
        return type(self)(0.0 - self._tensor, self._largest)

    def largest(self) -> Tensor:
        """Return max |W_ij|, (...), float64; of a checked W it is known."""
        if self._largest is None:
            self._largest = torch.maximum(self._tensor.amax((-1, -2)), -self._tensor.amin((-1, -2))).double()
        return self._largest.reshape(self.batch).to(self.device)

    def objective(self, mask: Tensor) -> Tensor:
        """Return f of masks (..., n), exact to the last digit; O(n²)."""
        return self._sums(mask).value.clone()  # which the caller may change

    def magnitude(self, mask: Tensor) -> Tensor:
        return self._sums(mask).size

    def _sums(self, mask: Tensor) -> Sums:
        """Both, summed once where they are asked for one after the other."""
        last = self._last
        if last is None or last[0].shape != mask.shape or not torch.equal(last[0], mask):
            self._last = last = (mask.clone(), exact_sums(self._tensor, mask))
        return last[1]

    def objective_fast(self, mask: Tensor) -> Tensor:
        """Return f in one pass over W, without a float64 copy: row sums in W's own precision, or better.

        Rounding error about ``n eps * sum |W_ij|`` over the chosen entries (eps of W's dtype). O(n²) per instance.
        """
        x = mask.to(self.dtype)
        rows = (x.unsqueeze(-2) @ self._tensor).squeeze(-2)  # W is symmetric; this side of it is the faster one
        return (rows * x).sum(-1, dtype=torch.float64)

    def step(self, candidates: Tensor) -> Tensor:
        W, alive = self._tensor.detach().to("cpu").double().numpy(), candidates.cpu().numpy()
        pairs = zip(W.reshape(-1, self.n, self.n), alive.reshape(-1, self.n), strict=True)
        found = [_step_of(one if free.all() else one[np.ix_(free, free)]) for one, free in pairs]
        return torch.tensor(found, dtype=torch.float64, device=self.device).reshape(self.batch)

    def path(self, order: Tensor) -> Tensor:
        return cost_path(self._tensor, order)

    def small(self) -> DenseWeights:
        """Return `small_weights` in W's precision."""
        return small_weights(self.dtype)

    def reshape(self, *shape: int) -> Self:
        return type(self)(self._tensor.reshape(shape), self._largest)

    def __getitem__(self, at: Any) -> Self:
        """Return instances of a batch; W itself for all of them in order."""
        if isinstance(at, Tensor) and at.shape == self.batch and self._tensor.is_contiguous() and _ascends(at):
            return self
        return type(self)(self._tensor[at])

    def clone(self) -> Self:
        return type(self)(self._tensor.clone(), self._largest)

    def numbers(self) -> list[Tensor]:
        """Return the bits of W: NaNs with equal bits are equal."""
        return [self._tensor.view(torch.int64 if self.dtype == torch.float64 else torch.int32)]

    def _to_dense(self) -> Tensor:
        return self._tensor

    def dense(self, wanted_by: str) -> Tensor:
        """Return the tensor itself, which takes no more memory."""
        return self._tensor


def small_weights(dtype: torch.dtype = torch.float64) -> DenseWeights:
    """W of 24 vertices, which no bound settles: every part of a search runs."""
    place = torch.arange(24.0, dtype=torch.float64, device="cpu")
    return DenseWeights(torch.cos(7 * place[:, None] * place).to(dtype)[None])


def _ascends(rows: Tensor) -> bool:
    return rows.dtype != torch.bool and bool((rows.diff() > 0).all())


def _step_of(W: npt.NDArray[np.float64]) -> float:
    """The step of one instance's candidates; a row of real weights shows that there is none."""
    if W[:1].any() and not common_divisor(W[:1]):
        return 0.0
    weights = 2 * W
    np.fill_diagonal(weights, W.diagonal())
    return common_divisor(weights)
