"""`Weights`: W in a form that is not a tensor, because as one it would take n² numbers.

What solvers, bounds and the objective may call on such a W. `grace_opt.problem.sparse` and `grace_opt.problem.factored`
are the forms. When: for code that takes W of any form; a method that reads a tensor gets one (`Weights.dense`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..._util.memory import free_memory
from ...errors import ProblemError


class Weights(ABC):
    """Symmetric W (..., n, n) in float64, with the few operations of a tensor that a `Problem` needs.

    Attributes
    ----------
    form : str
        Name of the form: what a solver is registered with, ``forms=("sparse",)``, to be given it.
    batch : tuple of int
        The leading dimensions.
    arrays : tuple
        The user's arrays that it was made of: answers are of their kind.
    integer : bool
        Whether all of W is made of integers, and sums of it are exact.
    """

    form: ClassVar[str]
    batch: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    arrays: tuple[Any, ...] = ()
    integer: bool = False

    @property
    @abstractmethod
    def n(self) -> int:
        """Number of vertices."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the numbers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, (..., n, n)."""
        return (*self.batch, self.n, self.n)

    @abstractmethod
    def numel(self) -> int:
        """Return how many numbers are stored: what one pass over W reads."""

    @abstractmethod
    def diagonal(self, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
        """Return the node weights (..., n), float64."""

    @abstractmethod
    def with_diagonal(self, diagonal: Tensor) -> Self:
        """Return the same edges with these node weights (..., n)."""

    @abstractmethod
    def negated(self) -> Self:
        """Return -W, exactly."""

    @abstractmethod
    def without(self, vertices: Tensor) -> Self:
        """Return W with rows and columns of these vertices, a mask (..., n), set to zero."""

    @abstractmethod
    def times(self, x: Tensor) -> Tensor:
        """Return W x for x (..., n), float64."""

    @abstractmethod
    def objective(self, mask: Tensor) -> Tensor:
        """Return f of masks (..., n), float64, (...)."""

    @abstractmethod
    def magnitude(self, mask: Tensor) -> Tensor:
        """Return at least the sum of ``|W_ij|`` over chosen vertices, (...), float64: f is rounded relative to it."""

    @abstractmethod
    def step(self, candidates: Tensor) -> Tensor:
        """Return a number that divides f of every choice of candidates (..., n), (...), float64; 0: none is known."""

    @abstractmethod
    def reshape(self, *shape: int) -> Self:
        """Return the same instances with other leading dimensions; the last two are n."""

    @abstractmethod
    def __getitem__(self, index: Any) -> Self:
        """Return instances of a batch, as a tensor's first dimension is indexed."""

    @abstractmethod
    def clone(self) -> Self:
        """Return the same W in memory of its own, the user's arrays included: for code that might write into it."""

    @abstractmethod
    def numbers(self) -> list[Tensor]:
        """Return all that W consists of, without a copy: two W of a form are the same if these are."""

    @abstractmethod
    def _to_dense(self) -> Tensor:
        """Return W as a tensor, whatever memory that takes."""

    def dense(self, wanted_by: str, copies: int = 1) -> Tensor:
        """Return W as a tensor (..., n, n), float64.

        Raises
        ------
        ProblemError
            If it would take more memory than is free; the message names `wanted_by`, and says how much.
        """
        need, free = 8.0 * copies * self.n**2 * max(1, _product(self.batch)), free_memory()
        if need > free:
            raise ProblemError(
                f"{wanted_by} reads all {self.n:,}² entries of W, which take {need / 2**30:.3g} GiB, and "
                f"{free / 2**30:.3g} GiB are free: use a method that takes W in its {self.form} form."
            )
        return self._to_dense()


def _product(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
