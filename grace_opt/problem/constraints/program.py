"""`Program`: an integer program of linear rows for HiGHS, whose answers are checked in exact integers.

`scipy.optimize.milp` works with tolerances. A point counts only if it keeps every row exactly; that there is none is
taken from HiGHS only for rows with small coefficients, and of costs only beyond all tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .rows import Row

Floats = npt.NDArray[np.float64]
#: By how much the cheapest choice must exceed the budget, relative to it, before nobody's tolerance can be to blame.
CERTAIN = 1e-6
#: Objectives are scaled to this size: HiGHS ends at an absolute gap of 1e-6.
OBJECTIVE = 1e4
#: So many choices that exceed the budget by less are excluded, one after the other.
EXCLUDED = 100


class UndecidedError(Exception):
    """Neither a choice was found, nor was it shown that there is none."""


class Program:
    """An integer program: all rows, those that HiGHS may see as they are, and bounds of the vertices."""

    def __init__(self, n: int, rows: list[Row], narrow: list[Row], low: Floats, high: Floats, seconds: float) -> None:
        self.n, self.rows, self.narrow, self.low, self.high, self.seconds = n, rows, narrow, low, high, seconds

    def kept_by(self, point: npt.NDArray[np.bool_]) -> bool:
        """Whether a point keeps everything, exactly."""
        inside = bool((self.low <= point).all() and (point <= self.high).all())
        chosen = set(np.flatnonzero(point).tolist())
        return inside and all(row.holds(chosen) for row in self.rows)

    def solved(
        self,
        objective: Floats | None,
        gap: float,
        within: Floats | None = None,
        without: Sequence[npt.NDArray[np.bool_]] = (),
    ) -> tuple[npt.NDArray[np.bool_], float] | None:
        """A point that keeps the narrow rows up to tolerances, and a bound on the objective; None if there is none.

        Parameters
        ----------
        objective : ndarray (n,), optional
        gap : float
            Relative gap at which to end.
        within : ndarray (n,), optional
            Prices, whose sum is at most 1.
        without : sequence of ndarray (n,), bool
            Points that are excluded.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array, vstack

        c = np.zeros(self.n) if objective is None else objective
        size = float(np.abs(c).max(initial=0.0))
        c = c / size * OBJECTIVE if size else c
        blocks, lower, upper = [], [], []
        if self.narrow:
            ends = np.cumsum([0, *(len(row.vertices) for row in self.narrow)])
            entries = np.array([count for row in self.narrow for count in row.coefficients], np.float64)
            columns = np.array([vertex for row in self.narrow for vertex in row.vertices], np.int64)
            blocks.append(csr_array((entries, columns, ends), shape=(len(self.narrow), self.n)))
            lower += [-np.inf if row.lower is None else float(row.lower) for row in self.narrow]
            upper += [np.inf if row.upper is None else float(row.upper) for row in self.narrow]
        if within is not None:
            blocks.append(csr_array(within[None]))
            lower, upper = [*lower, -np.inf], [*upper, 1.0]
        for point in without:
            blocks.append(csr_array(np.where(point, 1.0, -1.0)[None]))
            lower, upper = [*lower, -np.inf], [*upper, float(point.sum()) - 1.0]
        found = milp(
            c,
            integrality=np.ones(self.n),
            bounds=Bounds(self.low, self.high),
            constraints=LinearConstraint(vstack(blocks, "csr"), lower, upper) if blocks else (),
            options={"time_limit": self.seconds, "mip_rel_gap": gap},
        )
        if found.status == 2:
            return None
        if found.x is None:
            raise UndecidedError
        bound = -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound) * size / OBJECTIVE
        return np.asarray(found.x) > 0.5, bound

    def cheapest(self, prices: Floats) -> npt.NDArray[np.bool_] | None:
        """A point that keeps everything exactly, the sum of prices with it; None if the cheapest exceeds it."""
        excluded: list[npt.NDArray[np.bool_]] = []
        while len(excluded) <= EXCLUDED:
            found = self.solved(prices, 0.0, without=excluded)
            if found is None or found[1] > 1.0 + CERTAIN:
                return None
            if self.kept_by(found[0]):
                return found[0]
            excluded.append(found[0])
        raise UndecidedError
