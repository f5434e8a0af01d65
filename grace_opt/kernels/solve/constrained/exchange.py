r"""`ConstrainedExchanges`: exchanges that keep linear rows, until none improves f.

Vertices that are chosen together or not at all are one unit: with :math:`Z` its members' columns, :math:`Z^\top W Z` is
the weight of units, and rows over vertices become rows over units. One unit is exchanged for another; where that no
longer helps, up to two for two, which also gets past rows that hold every single exchange up. An exchange is made only
if it lowers f by more than its rounding (`grace_opt.kernels.solve.exchange.rounding`), from sums made anew: no choice
comes twice, and none is worse than the first.

When: `local_search` with constraints. Complexity: O(m²) per exchange of m units, plus the rows of those that would
help; O(a² b²) for two for two, of a units that may leave and b that may enter, promising ones if these are many.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..exchange.rounding import tolerance

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
#: Most exchanges of two for two that one step looks at, four numbers each.
PAIRS_AT_ONCE = 2e7


class ConstrainedExchanges:
    """The search of one instance.

    Parameters
    ----------
    W : ndarray (n, n), float64
        Of a size near one: sums must neither overflow nor vanish.
    chosen : ndarray (n,), bool
        A choice that keeps the rows.
    candidates : ndarray (n,), bool
    units : ndarray (n,), int64
        The unit of each vertex, from 0 on.
    A, lower, upper, limbs, limit : ndarray
        The rows over vertices; the size is one more.

    Examples
    --------
    >>> nothing = np.zeros((0, 3), np.int64), np.zeros(0, np.int64)
    >>> rows = np.array([[1, 1, 0]]), np.array([1]), np.array([1])  # exactly one of the first two
    >>> W, chosen = np.diag([3.0, 2.0, 1.0]), np.array([True, False, True])
    >>> search = ConstrainedExchanges(W, chosen, np.ones(3, bool), np.arange(3), *rows, *nothing)
    >>> search.step(), search.chosen.tolist(), search.step()
    (True, [False, True, True], False)
    """

    def __init__(
        self,
        W: Floats,
        chosen: Bools,
        candidates: Bools,
        units: Integers,
        A: Integers,
        lower: Integers,
        upper: Integers,
        limbs: Integers,
        limit: Integers,
    ) -> None:
        n, m = len(W), int(units.max(initial=-1)) + 1
        self.units, self.limit = units, limit
        if m == n:  # no unit has two members
            self.W, sizes = np.ascontiguousarray(W[np.ix_(np.argsort(units), np.argsort(units))]), None
        else:
            Z = np.zeros((n, m))
            Z[np.arange(n), units] = 1.0
            self.W, sizes = np.ascontiguousarray(Z.T @ W @ Z), Z.T @ np.abs(W) @ Z
        self.sizes = np.abs(self.W) if sizes is None else sizes
        self.tolerance = 2.0 * tolerance(n)
        self.x, self.free = np.zeros(m, bool), np.ones(m, bool)
        self.x[units[chosen]] = True
        self.free[units[~candidates]] = False
        count = int(chosen.sum())
        every = np.ones((1, n), np.int64)
        self.lower, self.upper = np.append(lower, count), np.append(upper, count)
        self.entries, self.limbs = self._by_unit(np.vstack([A, every]), m), self._by_unit(limbs, m)

    def _by_unit(self, rows: Integers, m: int) -> Integers:
        found = np.zeros((m, len(rows)), np.int64)
        np.add.at(found, self.units, rows.T)
        return found

    @property
    def chosen(self) -> Bools:
        """The choice so far, (n,)."""
        return self.x[self.units]

    def step(self) -> bool:
        """Make the best exchange; return False if none improves f."""
        from .cpu.exchange import best_exchange  # importing numba takes a while

        x = self.x.astype(np.float64)
        diagonal = self.W.diagonal()
        sums = self.W @ x - diagonal * x
        own = np.where(self.x, -(diagonal + 2.0 * sums), diagonal + 2.0 * sums)
        own_size = self.sizes.diagonal() * (1.0 - 2.0 * x) + 2.0 * (self.sizes @ x)
        margin = self.tolerance * own_size
        outs, ins = np.flatnonzero(self.x & self.free), np.flatnonzero(~self.x & self.free)
        kept = self.entries[self.x].sum(0), self.lower, self.upper, self.limbs, self.limbs[self.x].sum(0), self.limit
        best, weights = np.empty(4, np.int64), (self.W, self.sizes, self.tolerance)
        change = best_exchange(*weights, own, margin, outs, ins, False, best, self.entries, *kept)
        if not change < 0.0:
            few = _promising(own, outs, ins)
            change = best_exchange(*weights, own, margin, *few, True, best, self.entries, *kept)
        if not change < 0.0:
            return False
        out, new = best[:2], best[2:]
        self.x[out[out >= 0]] = False
        self.x[new[new >= 0]] = True
        return True


def _promising(own: Floats, outs: Integers, ins: Integers) -> tuple[Integers, Integers]:
    """All units that may leave and enter, or those with the least cost of their own if there are too many."""
    a, b = len(outs), len(ins)
    if (a * b) ** 2 / 4.0 > PAIRS_AT_ONCE:
        most = int((4.0 * PAIRS_AT_ONCE) ** 0.25)
        a = min(a, max(most, int(most**2 / max(b, 1))))
        b = min(b, max(most, int(most**2 / max(a, 1))))
    return _least(own, outs, a), _least(own, ins, b)


def _least(own: Floats, units: Integers, count: int) -> Integers:
    return np.sort(units[np.argsort(own[units], kind="stable")[:count]])
