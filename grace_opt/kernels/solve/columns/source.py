"""`ColumnSource`: W that is never formed, but whose columns can be had at any time; and `Columns`, computed ahead.

When: what the loops beside this file take: `grace_opt.problem.FactoredWeights`. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

import torch
from torch import Tensor

#: Bytes of W that are held at a time. W itself is formed, an instance or a few at a time, if it takes no more.
BLOCK_BYTES = 1 << 26

#: Distance of 1 to the next float64.
EPS = torch.finfo(torch.float64).eps
#: Sums of whole numbers up to here are exact, halves included.
EXACT = 2.0**52


class ColumnSource(Protocol):
    """Symmetric W (..., n, n) whose columns are computed when they are needed, as `FactoredWeights` does."""

    @property
    def n(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def additions(self) -> int: ...
    def diagonal(self) -> Tensor: ...
    def times(self, x: Tensor) -> Tensor: ...
    def objective(self, mask: Tensor) -> Tensor: ...
    def columns(self, indices: Tensor) -> Tensor: ...
    def block(self, rows: Tensor | None, columns: Tensor | None) -> Tensor: ...
    def magnitude_rows(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def product_seconds(self) -> float: ...
    def __getitem__(self, at: int) -> Self: ...


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
    W : ColumnSource
        A single instance.
    """

    def __init__(self, W: ColumnSource) -> None:
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
