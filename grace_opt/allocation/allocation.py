"""`Allocation`: what `allocate` returns, with its certified bound; it can verify itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import SolverError
from ..solution import GAP_FLOOR, MAX_INTEGER_WITH_HALVES, OPTIMALITY_RTOL, ROUNDING, STEP_MARGIN
from .frontier import Frontier
from .problem import AllocationProblem
from .sums import EPS


@dataclass(frozen=True, eq=False, repr=False)
class Allocation:
    """The answer to `allocate`, with one entry per instance; arrays are numpy or torch, as the losses were.

    Attributes
    ----------
    levels : array (..., n), int64
        The level of each group; the other attributes follow from it.
    cost : array (...), float64
        Sum of the costs.
    objective : array (...), float64
        Sum of the losses, exact up to the last digit.
    lower_bound : array (...), float64
        Certified: no allocation within the budgets has a smaller objective.
    gap : array (...), float64
        ``(objective - lower_bound) / max(|objective|, 1e-9 Σ|loss|)``, with the sum over the chosen levels; never
        negative.
    status : Status, or object array (...) of Status
        OPTIMAL if the bound proves it (`tolerance`), LIMIT if the time limit stopped it, or "exact" had more states
        than it may have, else FEASIBLE.
    multipliers : array (...), float64
        Price of the budget: the loss that one more unit of it would save, in the linear relaxation; 0 if the budget
        does not bind, or without one.
    part_multipliers : tuple of array (..., P), float64
        The same for each limit of each entry of ``parts``.
    part_costs : tuple of array (..., P), float64
        Sum of the costs in each part.
    method : str
    stats : mapping
        ``time`` in seconds.
    path : Frontier or None
        With ``path=True``, the whole frontier.
    problem : AllocationProblem or None
        What was solved; `verify` needs it.

    Examples
    --------
    >>> import grace_opt
    >>> grace_opt.allocate([[9.0, 3.0, 2.0], [4.0, 2.0, 1.0]], [0, 2, 4], 4)
    <Allocation by lagrangian: objective 5, cost 4, gap 0, OPTIMAL, levels [1, 1]>
    """

    levels: Any
    cost: Any
    objective: Any
    lower_bound: Any
    gap: Any
    status: Any
    multipliers: Any
    part_multipliers: tuple[Any, ...]
    part_costs: tuple[Any, ...]
    method: str
    stats: Mapping[str, Any]
    path: Frontier | None = None
    problem: AllocationProblem | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        if getattr(self.objective, "ndim", 0):
            counts = ", ".join(f"{count} {name}" for name, count in Counter(s.name for s in self.status.flat).items())
            return f"<Allocation of {self.status.size} instances by {self.method}: {counts}>"
        shown = self.levels.tolist()
        levels = str(shown[:20])[:-1] + (", …]" if len(shown) > 20 else "]")
        return (
            f"<Allocation by {self.method}: objective {float(self.objective):.9g}, cost {float(self.cost):.9g}, "
            f"gap {float(self.gap):.3g}, {self.status.name}, levels {levels}>"
        )

    def verify(self) -> Allocation:
        """Check levels, budgets, objective and bound against losses and costs, and return the allocation.

        Raises
        ------
        SolverError
            If a level is not admissible, a budget is exceeded, or the objective is not the sum of the losses or lies
            below its own bound.
        """
        if self.problem is None:
            raise SolverError("this Allocation has no problem to verify against: call allocate(...) to get one.")
        p = self.problem
        levels = torch.as_tensor(self.levels, device=p.losses.device).reshape(p.losses.shape[:-1])
        objective = torch.as_tensor(self.objective, dtype=torch.float64, device=p.losses.device).reshape(-1)
        bound = torch.as_tensor(self.lower_bound, dtype=torch.float64, device=p.losses.device).reshape(-1)
        inside = (levels >= 0) & (levels < p.losses.shape[-1])
        if not bool(inside.all()) or not bool(p.at(p.admissible, levels).all()):
            raise SolverError(f"{self.method} chose a level that is not admissible.")
        if not bool(p.keeps_budgets(levels).all()):
            raise SolverError(f"{self.method} exceeded a budget.")
        exact = p.objective(levels)
        if bool((objective != exact).any()):
            raise SolverError(f"{self.method}: stored objective {objective.tolist()} differs from {exact.tolist()}.")
        if bool((bound > exact).any()):
            raise SolverError(f"{self.method}: lower bound {bound.tolist()} lies above the objective {exact.tolist()}.")
        return self


def tolerance(problem: AllocationProblem, levels: Tensor, objective: Tensor) -> Tensor:
    """How far a bound may lie below the objective and still prove it optimal, (B,): the rule of `solve`.

    ``max(1e-9 |objective|, 64 n eps Σ|loss|)`` with the sum over the chosen levels; for losses of a whole-number dtype
    a whole step, less a millionth, as long as the objective is exact.
    """
    if problem.integer:
        wide = objective.abs() >= MAX_INTEGER_WITH_HALVES
        return torch.full_like(objective, 1.0 - STEP_MARGIN).masked_fill_(wide, 0.0)
    size = problem.at(problem.losses, levels).abs().sum(-1)
    return torch.maximum(OPTIMALITY_RTOL * objective.abs(), ROUNDING * levels.shape[-1] * EPS * size)


def relative_gap(problem: AllocationProblem, levels: Tensor, objective: Tensor, bound: Tensor) -> Tensor:
    """``(objective - bound) / max(|objective|, 1e-9 Σ|loss|)`` over the chosen levels; 0 if the bound is not below."""
    size = torch.maximum(objective.abs(), GAP_FLOOR * problem.at(problem.losses, levels).abs().sum(-1))
    difference = objective - bound
    gap = torch.where(difference <= 0, 0.0, difference / size)
    return gap.nan_to_num(nan=math.inf, posinf=math.inf)
