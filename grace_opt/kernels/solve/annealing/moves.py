"""`DenseMoves` and `SparseMoves`: a set that is annealed some proposals at a time, of W as a tensor or by its edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..sparse.forms import Graph

Floats = npt.NDArray[np.float64]


class DenseMoves:
    """The search of one instance of candidates alone; k and n - k are at least 1.

    Parameters
    ----------
    W : ndarray (n, n), float64
    x : ndarray (n,), bool
        Where to start.
    random : ndarray (1,), uint64
        State of the random numbers, not 0.

    Attributes
    ----------
    values : ndarray (4,)
        f of the current set, and of the best so far (``values[1]``), both updated with every exchange.
    best : BestSet
        ``best.x`` is the best set so far.
    """

    def __init__(self, W: Any, x: npt.NDArray[np.bool_], random: npt.NDArray[np.uint64]) -> None:
        from ..sparse.cpu.best_set import new_best_set

        self.W, self.x, self.random = W, x.copy(), random
        self.k, self.n, self.sums = int(x.sum()), len(x), np.empty(len(x))
        self.values, self.best = np.full(4, np.inf), new_best_set(x)
        self._prepare()
        self.refresh()
        self.values[1] = self.values[0]

    def _prepare(self) -> None:
        from ..tabu.cpu import scales

        self.grain = float(scales(self.W, np.empty(len(self.W))))

    def refresh(self) -> None:
        """Sum everything afresh, and put the vertices in order."""
        self._sum()
        inside = np.flatnonzero(self.x)
        self.order = np.concatenate([inside, np.flatnonzero(~self.x)]).astype(np.int32)

    def _sum(self) -> None:
        from ..tabu.cpu import fill_sums

        self.values[0] = fill_sums(self.W, self.x, self.sums)[0]

    def changes(self, count: int) -> Floats:
        """Return by how much f would change by random exchanges."""
        rng = np.random.default_rng(int(self.random[0]))
        out, into = self.order[rng.integers(0, self.k, count)], self.order[rng.integers(self.k, self.n, count)]
        entering, leaving = self._costs()
        return np.asarray(entering[into] - leaving[out] - 2.0 * self._weights(out, into))

    def _costs(self) -> tuple[Floats, Floats]:
        diagonal = self.W.diagonal()
        return diagonal + 2 * self.sums, 2 * self.sums - diagonal

    def _weights(self, first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> Floats:
        return np.asarray(self.W[first, second])

    def anneal(self, hot: float, cold: float, proposals: int) -> int:
        """Make this many proposals, at temperatures from `hot` to `cold`; return how many exchanges were made."""
        from .cpu import anneal_dense

        sets = self.x, self.sums, self.order, self.k, self.best, self.values
        return int(anneal_dense(self.W, self.grain, *sets, self.random, hot, cold, proposals))


class SparseMoves(DenseMoves):
    """The same over edges: `W` is a `Graph`; an exchange costs the degrees of its two vertices."""

    W: Graph

    def _prepare(self) -> None:
        from ..sparse.cpu.exchange import largest
        from ..sparse.cpu.sums import least_weight

        self.grain, self.top = float(least_weight(self.W)), np.empty(self.n)
        largest(self.W, self.top)

    def _sum(self) -> None:
        from ..sparse.cpu.sums import fill_costs, objective

        fill_costs(self.W, self.x, self.sums)
        self.values[0] = objective(self.W, self.x)[0]

    def _costs(self) -> tuple[Floats, Floats]:
        return self.sums, self.sums

    def _weights(self, first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> Floats:
        from ..sparse.cpu.sums import fill_weights

        fill_weights(self.W, first, second, output := np.empty(len(first)))
        return output

    def anneal(self, hot: float, cold: float, proposals: int) -> int:
        """Make this many proposals, at temperatures from `hot` to `cold`; return how many exchanges were made."""
        from .cpu import anneal_sparse

        sets = self.x, self.sums, self.order, self.k, self.best, self.values
        return int(anneal_sparse(self.W, self.top, self.grain, *sets, self.random, hot, cold, proposals))
