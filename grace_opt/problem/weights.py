"""`Weights`: W of a `Problem` in whatever form it has, and what solvers, bounds and the objective may call on it.

The forms are beside this file: a tensor (`dense`), edges (`sparse`), factors (`factored`). When: for code that
takes W of any form. What differs by form is a `functools.singledispatch` function of W, one per operation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from .._util.memory import free_memory
from ..errors import ProblemError

Form = TypeVar("Form", bound="Weights")


class Weights(ABC):
    """Symmetric W (..., n, n), in float64 but for tensors.

    Attributes
    ----------
    form : str
        Name of the form: what a solver is registered with, ``forms=("sparse",)``, to be given it.
    is_rounded : bool
        Whether entries are rounded when W is written out as a tensor.
    batch : tuple of int
        The leading dimensions.
    arrays : tuple
        The user's arrays that it was made of: answers are of their kind.
    integer : bool
        Whether all of W is made of integers, and sums of it are exact.
    """

    form: ClassVar[str]
    is_rounded: ClassVar[bool] = False
    batch: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    arrays: tuple[Any, ...] = ()
    integer: bool = False

    def __repr__(self) -> str:
        """One short line: W is large."""
        return f"{type(self).__name__}(shape={self.shape}, device={str(self.device)!r})"

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

    @property
    def tensor(self) -> Tensor:
        """W (..., n, n), where it is a tensor; elsewhere a ProblemError says what to write instead."""
        raise ProblemError(
            f"problem.W is a tensor, and this W is in its {self.form} form: read problem.weights, or write "
            "problem.dense('my_method').W."
        )

    def in_form(self, form: type[Form], wanted_by: str) -> Form:
        """Return W itself, which `wanted_by` reads in this form; raises ProblemError if it is in another."""
        if not isinstance(self, form):
            made = " (of few vertices or many edges, W is made dense)" if form.form == "sparse" else ""
            raise ProblemError(
                f"{wanted_by} reads W in its {form.form} form, not in its {self.form} one{made}: use "
                "grace_opt.bounds.certificate, which takes every form."
            )
        return self

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the node weights (..., n)."""

    @abstractmethod
    def negated(self) -> Self:
        """Return -W, exactly."""

    @abstractmethod
    def objective(self, mask: Tensor) -> Tensor:
        """Return f of masks (..., n), float64, (...)."""

    def objective_fast(self, mask: Tensor) -> Tensor:
        """Return f of masks (..., n), float64, (...): of a tensor, with the rounding errors of its own precision."""
        return self.objective(mask)

    @abstractmethod
    def magnitude(self, mask: Tensor) -> Tensor:
        """Return at least the sum of ``|W_ij|`` over chosen vertices, (...), float64: f is rounded relative to it."""

    @abstractmethod
    def step(self, candidates: Tensor) -> Tensor:
        """Return a number that divides f of every choice of candidates (..., n), (...), float64; 0: none is known."""

    @abstractmethod
    def path(self, order: Tensor) -> Tensor:
        """Return f of the first j vertices of orders (B, m), padded with -1, for every j, (B, m + 1); or infinity."""

    @abstractmethod
    def largest(self) -> Tensor:
        """Return at least max |W_ij|, (...), float64."""

    def whole_at_once(self) -> int:
        """Return of how many instances W is written out at a time for a method that takes this form; 0: of none."""
        return 0

    def rounding(self, k: Tensor, candidates: Tensor) -> Tensor:
        """Return how far f of any k candidates may be off, (...), if W is written out as a tensor."""
        return torch.zeros(self.batch, dtype=torch.float64, device=self.device)

    @abstractmethod
    def small(self) -> Weights:
        """Return W of few vertices, a batch of one, in the form that methods get: for all that is to be compiled."""

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

    def dense(self, wanted_by: str) -> Tensor:
        """Return W as a tensor (..., n, n), float64.

        Raises
        ------
        ProblemError
            If it would take more memory than is free; the message names `wanted_by`, and says how much.
        """
        need, free = 8.0 * self.n**2 * max(1, math.prod(self.batch)), free_memory()
        if need > free:
            raise ProblemError(
                f"{wanted_by} reads all {self.n:,}² entries of W, which take {need / 2**30:.3g} GiB, and "
                f"{free / 2**30:.3g} GiB are free: use a method that takes W in its {self.form} form."
            )
        return self._to_dense()
