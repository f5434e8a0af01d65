"""`DepthFirst`: the compiled tree search of one subproblem, a slice of nodes at a time; and one that keeps linear rows.

For exact methods, which decide how long to search and what to do with the rest. The loop itself is in
`grace_opt.kernels.solve.search.cpu`, and in `grace_opt.kernels.solve.constrained.cpu.search`.
"""

from __future__ import annotations

import math
import time

import numpy as np
import numpy.typing as npt

from grace_opt.bounds.qcr import QuadraticRelaxation
from grace_opt.bounds.subproblem import Subproblem
from grace_opt.problem.constraints import IntegerRows


class DepthFirst:
    """The search of one subproblem, with its stack.

    Parameters
    ----------
    sub : Subproblem
        With ``0 < k < m``.
    relaxation : QuadraticRelaxation
        Of the same vertices.
    """

    def __init__(self, sub: Subproblem, relaxation: QuadraticRelaxation) -> None:
        m, depth = sub.m, sub.m + 8
        self.sub, self.relaxation, self.top = sub, relaxation, 1
        self.F, self.H = np.ascontiguousarray(relaxation.F), np.ascontiguousarray(relaxation.H)
        self.status = np.zeros((depth, m), np.int8)
        self.x, self.linear, self.pairs = (np.zeros((depth, m)) for _ in range(3))
        self.constants, self.bounds = np.zeros((depth, 3)), np.full(depth, -np.inf)
        self.x[0], self.linear[0], self.pairs[0] = relaxation.x, sub.linear, relaxation.F.sum(0)
        self.constants[0] = sub.constant, relaxation.pairs, sub.k
        self.bounds[0] = relaxation.bound
        self.best_x, self.leaf = np.zeros(m, bool), math.inf
        # Branch where most of the objective is relaxed: on the diagonal, or by products of pairs.
        self.weight = np.abs(relaxation.A - sub.W).sum(1)

    def advance(self, value: float, slack: float, count: int) -> tuple[float, int, npt.NDArray[np.bool_] | None]:
        """Search `count` nodes: returns seconds, nodes searched, and a choice better than `value`, if one was found.

        Updates `least_leaf` from the leaves among them, rounding included.
        """
        from grace_opt.kernels.solve.search.cpu import search  # importing numba takes a while

        r, began = self.relaxation, time.monotonic()
        self.top, best, used, leaf = search(
            *(
                self.sub.W,
                r.A,
                self.F,
                self.H,
                self.status,
                self.x,
                self.linear,
                self.pairs,
                self.constants,
                self.bounds,
            ),
            *(self.top, value, self.best_x, slack - r.rounding, self.weight, count),
        )
        self.leaf = min(self.leaf, leaf)
        return time.monotonic() - began, used, self.best_x.copy() if best < value else None

    def least_bound(self) -> float:
        """The least bound of the parts left to search; inf if none is left."""
        return float(self.bounds[: self.top].min()) - self.relaxation.rounding if self.top else math.inf

    def least_leaf(self) -> float:
        """A lower bound on the leaves seen so far, as far as it is below the cutoff they were compared with."""
        return self.leaf - self.relaxation.rounding


class ConstrainedDepthFirst(DepthFirst):
    """The search for choices that keep linear rows, of a subproblem that may pay for them.

    Parameters
    ----------
    sub, relaxation
        As for `DepthFirst`.
    rows : IntegerRows
        Over the instance's vertices.
    multipliers : ndarray (r,)
        Those that the subproblem's node weights pay for the rows.
    """

    def __init__(
        self,
        sub: Subproblem,
        relaxation: QuadraticRelaxation,
        rows: IntegerRows,
        multipliers: npt.NDArray[np.float64],
    ) -> None:
        super().__init__(sub, relaxation)
        kept = rows.restricted(sub.chosen, sub.vertices)
        self.entries, self.limbs = np.ascontiguousarray(kept.A.T), np.ascontiguousarray(kept.limbs.T)
        self.order = np.ascontiguousarray(np.argsort(kept.A, axis=1, kind="stable"))
        self.kept, self.multipliers = kept, multipliers
        self.paid = np.where(multipliers >= 0, kept.upper, kept.lower)

    def advance(self, value: float, slack: float, count: int) -> tuple[float, int, npt.NDArray[np.bool_] | None]:
        """As `DepthFirst.advance`; the choice keeps the rows and may be better: its f is to be summed."""
        from grace_opt.kernels.solve.constrained.cpu.search import search

        r, kept, began = self.relaxation, self.kept, time.monotonic()
        nodes = self.sub.W, r.A, self.F, self.H, self.status, self.x, self.linear, self.pairs, self.constants
        self.top, used, found = search(
            *(*nodes, self.bounds, self.top, value, self.best_x, slack - r.rounding, self.weight, count),
            *(self.entries, self.order, kept.lower, kept.upper, self.limbs, kept.limit, self.multipliers, self.paid),
        )
        return time.monotonic() - began, used, self.best_x.copy() if found else None
