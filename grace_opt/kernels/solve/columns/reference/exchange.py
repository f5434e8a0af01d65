r"""Exchanges on W that is never formed: windows, small dense problems of some vertices, and proofs of local optima.

With all vertices outside a window U fixed, choosing within it is the same problem with :math:`W'_{ii} = W_{ii} + 2
\sum_{j \in S \setminus U} W_{ij}`, which any dense search can solve: large neighbourhood search. `improving` looks at
all exchanges, a block of columns at a time, and skips vertices for which the lengths of their factors rule one out.
Source: Shaw (1998) for the neighbourhoods; `grace_opt.kernels.solve.exchange` for exchanges and their rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...exchange.rounding import ADDITIONS
from .. import source
from ..source import EPS, ColumnSource

#: Products of W with a vector that it takes to begin, and for each window that is accepted.
BEGINNING, ACCEPTING = 4, 2


def window_size() -> int:
    """Return the number of vertices of a window: its W takes an eighth of a block.

    Examples
    --------
    >>> window_size()
    1024
    """
    return max(8, math.isqrt(source.BLOCK_BYTES // 64))


class ExchangeState:
    """A choice of a single instance, with the changes of f when a vertex leaves or enters, and their rounding.

    Parameters
    ----------
    W : ColumnSource
        A single instance.
    mask, candidates : Tensor (n,), bool
    """

    def __init__(self, W: ColumnSource, mask: Tensor, candidates: Tensor) -> None:
        self.W, self.candidates, self.weights = W, candidates, W.diagonal()
        self.margin = (W.additions + ADDITIONS) * EPS * W.magnitude_rows()
        self.lengths = W.lengths()
        self.move(mask)

    def move(self, mask: Tensor) -> None:
        """Take another choice; O(n d²)."""
        self.mask, self.sums = mask, self.W.times(mask)
        self.value = float(self.W.objective(mask))

    @property
    def leave(self) -> Tensor:
        """The change of f when a vertex leaves, infinite for those outside."""
        return torch.where(self.mask, self.weights - 2 * self.sums, torch.inf)

    @property
    def enter(self) -> Tensor:
        """The change of f when a vertex enters, infinite for those that cannot."""
        return torch.where(self.candidates & ~self.mask, self.weights + 2 * self.sums, torch.inf)

    def promising(self, count: int) -> Tensor:
        """Return up to `count` vertices, sorted: half of them cheap to take out, half of them cheap to put in."""
        vertices = [_least(price, count // 2) for price in (self.leave, self.enter)]
        return torch.cat(vertices).sort().values

    def improving(self, count: int, expired: Callable[[], bool]) -> Tensor | None:
        """Return up to `count` vertices of exchanges that improve f despite rounding; none proves a local optimum.

        None if time was up first. O(k n d) at worst.
        """
        leave, enter = self.leave + self.margin, self.enter + self.margin
        low, longest = enter.min(), torch.where(enter < torch.inf, self.lengths, 0.0).max()
        hopeful = leave + low - 2 * self.lengths * longest * (1 + self.W.additions * EPS) < 0
        places = hopeful.nonzero().squeeze(-1)
        places = places[leave[places].argsort(stable=True)]
        free = (enter < torch.inf).nonzero().squeeze(-1)
        pairs: list[Tensor] = []
        for block in source.blocks(len(free), len(places), places.device):
            if expired():
                return None
            change = enter[free].unsqueeze(-1) - 2 * self.W.block(free, places[block])
            best, which = change.min(0)
            good = best + leave[places[block]] < 0
            if bool(good.any()):
                pairs += [places[block][good][: count // 2], free[which[good]][: count // 2]]
                break
        return _distinct(torch.cat(pairs)) if pairs else places[:0]

    def window(self, vertices: Tensor) -> tuple[Tensor, int, Tensor]:
        """Return the dense problem of a window, its W and k, and which of its vertices are chosen now."""
        block, inside = self.W.block(vertices, vertices), self.mask[vertices]
        block = block.add_(block.mT.clone()).div_(2)
        fixed = self.sums[vertices] - block @ inside.to(block)
        block.diagonal().copy_(self.weights[vertices] + 2 * fixed)
        return block, int(inside.sum()), inside

    def accept(self, vertices: Tensor, inside: Tensor) -> bool:
        """Take a window's answer if f falls; whether it did."""
        mask = self.mask.clone()
        mask[vertices] = inside
        value = float(self.W.objective(mask))
        if not value < self.value:
            return False
        self.move(mask)
        return True


def _distinct(vertices: Tensor) -> Tensor:
    """The vertices in order, each once."""
    return torch.tensor(sorted(set(vertices.tolist())), dtype=torch.int64, device=vertices.device)


def _least(price: Tensor, count: int) -> Tensor:
    """The vertices of the least finite prices, the lowest numbers of equals."""
    order = price.argsort(stable=True)[:count]
    return order[price[order] < torch.inf]
