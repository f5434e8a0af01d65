"""`ColumnWeights`: W that is never formed, but whose columns can be had at any time; and `Columns`, computed ahead.

When: base of `grace_opt.problem.FactoredWeights`, and what the loops beside this file take. Source: ours.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from ..weights import Weights

#: Bytes of W that are held at a time. W itself is formed, an instance or a few at a time, if it takes no more.
BLOCK_BYTES = 1 << 26

#: Approximate seconds per multiplication of a product with a vector.
SECONDS_TO_MULTIPLY = 4e-10

#: Distance of 1 to the next float64.
EPS = torch.finfo(torch.float64).eps
#: Sums of whole numbers up to here are exact, halves included.
EXACT = 2.0**52


class ColumnWeights(Weights):
    """Symmetric W (..., n, n) whose columns are computed when they are needed."""

    @abstractmethod
    def columns(self, indices: Tensor) -> Tensor:
        """Return columns of W, (..., n, m) float64, for indices (m,) or (..., m)."""

    @abstractmethod
    def block(self, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        """Return some rows and columns of a single instance; None means all of them."""

    @property
    @abstractmethod
    def additions(self) -> int:
        """A number of additions: every sum over W is off by at most this times eps times the sum of `magnitude`."""

    @abstractmethod
    def work(self) -> float:
        """Return the number of multiplications of a product with a vector, for all instances together."""

    def product_seconds(self) -> float:
        """Return the approximate seconds of a product with a vector, for all instances together."""
        return SECONDS_TO_MULTIPLY * self.work()

    @abstractmethod
    def magnitude_rows(self) -> Tensor:
        """Return at least the sum of ``|W_ij|`` over j, (..., n), for each i: what `magnitude` is made of."""

    @abstractmethod
    def lengths(self) -> Tensor:
        """Return numbers (..., n) with ``|W_ij| <= lengths_i lengths_j`` for all i other than j."""

    def whole_at_once(self) -> int:
        """Return of how many instances W may be formed at a time; 0 if W of one takes more than `BLOCK_BYTES`."""
        return BLOCK_BYTES // (8 * self.n**2)

    def rounding(self, k: Tensor, candidates: Tensor) -> Tensor:
        """Return how far f of any k candidates may be off, (...): by rounding of W's entries and of their sum."""
        rows = self.magnitude_rows().masked_fill(~candidates, 0.0).sort(-1, descending=True).values
        taken = torch.arange(self.n, device=rows.device) < k.unsqueeze(-1)
        return 2.0 * self.additions * EPS * torch.where(taken, rows, 0.0).sum(-1)


def blocks(height: int, count: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the numbers below `count`, so many at a time that two columns of `height` for each fit into a block."""
    size, everyone = max(1, BLOCK_BYTES // (16 * max(1, height))), torch.arange(count, device=device)
    for first in range(0, count, size):
        yield everyone[first : first + size]


#: Fewest and most columns computed at once.
LEAST_AHEAD, MOST_AHEAD = 1, 128


class Columns:
    """Columns of a single instance, computed some at a time: with each, those that will probably be wanted next.

    A product with many columns takes a fraction of the time of as many products with one. The number that is computed
    ahead doubles while most of them are used, and is halved while they are not.

    Parameters
    ----------
    W : ColumnWeights
        A single instance.
    """

    def __init__(self, W: ColumnWeights) -> None:
        self.W, self.ahead, self.used = W, 8, 0
        self.most = max(LEAST_AHEAD, min(MOST_AHEAD, BLOCK_BYTES // (16 * W.n)))
        self.held: dict[int, Tensor] = {}

    def column(self, vertex: int, scores: Tensor) -> Tensor:
        """Return a column (n,), once; vertices of the least scores are wanted next, infinite ones never are."""
        if vertex not in self.held:
            self._compute(vertex, scores)
        self.used += 1
        return self.held.pop(vertex)

    def _compute(self, vertex: int, scores: Tensor) -> None:
        if self.used * 2 > self.ahead:
            self.ahead = min(2 * self.ahead, self.most)
        elif self.used * 4 < self.ahead:
            self.ahead = max(self.ahead // 2, LEAST_AHEAD)
        self.used = 0
        least = scores.topk(min(self.ahead, self.W.n), largest=False)
        needed = {vertex} | set(least.indices[least.values < torch.inf].tolist())
        # Copies: a row that is kept would keep the whole block that it is part of.
        self.held = {v: column.clone() for v, column in self.held.items() if v in needed}
        new = sorted(needed - self.held.keys())
        rows = self.W.block(torch.tensor(new, dtype=torch.int64, device=scores.device), None)
        self.held |= dict(zip(new, rows, strict=True))
