"""`Frontier`: the best allocations for a whole range of budgets, from one pass over the steps of all hulls.

Each point is reached by one step from the point before. At its own budget, every point is optimal: there the linear
relaxation has a solution without fractions. Between two points, the relaxation's value is that of the straight line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._util.array_like import as_tensor
from .._util.parameters import integer
from ..errors import ProblemError
from ..kernels.steps import Hulls
from .dual import least_terms
from .problem import AllocationProblem, times_power_of_two, unscale
from .sums import EPS, exact_sum, running_sums

#: Number of prices at which bounds are computed; with more points than that, the others use the nearest ones.
MAX_PRICES = 1024


@dataclass(frozen=True, eq=False)
class Frontier:
    """Points on the lower convex hull of all allocations, one entry per instance of the batch.

    M is the largest number of steps in the batch; instances with fewer repeat their last point.

    Attributes
    ----------
    budgets : array (..., M + 1), float64
        Cost of each point, increasing from the smallest budget that can be kept.
    objectives : array (..., M + 1), float64
        Sum of the losses at each point.
    lower_bounds : array (..., M + 1), float64
        Certified: no allocation within that budget has a smaller objective.
    prices : array (..., M), float64
        Loss saved per unit of cost by each step, in decreasing order; 0 where an instance has no more steps.
    groups : array (..., M), int64
        The group whose level each step changes.
    """

    budgets: Any
    objectives: Any
    lower_bounds: Any
    prices: Any
    groups: Any
    _levels: Tensor = field(repr=False)
    _groups: Tensor = field(repr=False)
    _problem: AllocationProblem = field(repr=False)

    def levels(self, point: Any) -> Any:
        """Levels of each group at a point, (..., n), int64.

        Parameters
        ----------
        point : int, or int array broadcastable to (...)
            From 0 to M.

        Examples
        --------
        >>> import grace_opt
        >>> path = grace_opt.allocate([[9.0, 3.0, 2.0], [4.0, 2.0, 1.0]], [0, 2, 4], 8, path=True).path
        >>> path.budgets.tolist(), path.objectives.tolist()
        ([0.0, 2.0, 4.0, 6.0, 8.0], [13.0, 7.0, 5.0, 4.0, 3.0])
        >>> path.levels(2).tolist()
        [1, 1]
        """
        count = self._groups.shape[-1]
        if hasattr(point, "shape") or isinstance(point, list | tuple):
            wanted = as_tensor(point, "point", f"an integer from 0 to {count}, or one per instance")
            whole = not wanted.dtype.is_floating_point and wanted.dtype != torch.bool
            if not whole or bool(((wanted < 0) | (wanted > count)).any()):
                raise ProblemError(f"point={point!r}: give an integer from 0 to {count}, or one per instance.")
            shape = self._problem.batch_shape
            try:
                wanted = wanted.to(self._groups.device).expand(shape).reshape(-1)
            except RuntimeError:
                per = f"one per instance, shape {shape}" if shape else "only one, as there is one instance"
                raise ProblemError(
                    f"point has shape {tuple(wanted.shape)}: give an integer from 0 to {count}, or {per}."
                ) from None
        else:
            found = integer("point", point, at_least=0, at_most=count, error=ProblemError)
            wanted = torch.full_like(self._levels[:, 0, 0], found)
        taken = torch.arange(count, device=wanted.device) < wanted[:, None]  # beyond its last step, a level repeats
        steps = torch.zeros_like(self._levels[..., 0]).scatter_add_(-1, self._groups, taken.to(torch.int64))
        return self._problem.export(self._problem.at(self._levels, steps))


def frontier(problem: AllocationProblem, steps: Hulls) -> Frontier:
    """The frontier of a problem with a single budget; `steps` are the hulls of ``problem.scaled``.

    Complexity: O(n L log(n L)) per instance, and O(n L) for each of at most `MAX_PRICES` prices.
    """
    slopes, order = steps.slope.flatten(1).sort(dim=-1, descending=True, stable=True)
    count = int((slopes > 0).sum(-1).max())
    slopes, order = slopes[:, :count], order[:, :count]
    groups = order // max(steps.slope.shape[-1], 1)
    budgets, objectives = (_along(problem, values, steps, order, slopes) for values in (problem.costs, problem.losses))
    loss_shift, cost_shift = problem.shifts
    bounds = unscale(_bounds(problem.scaled, slopes, _scaled(budgets, cost_shift)), loss_shift)
    return Frontier(
        problem.export(budgets),
        problem.export(objectives),
        problem.export(torch.minimum(bounds, objectives)),
        problem.export(times_power_of_two(slopes, (loss_shift - cost_shift)[:, None])),
        problem.export(groups),
        steps.levels,
        groups,
        problem,
    )


def _along(problem: AllocationProblem, values: Tensor, steps: Hulls, order: Tensor, slopes: Tensor) -> Tensor:
    """Sum over the groups of losses or costs at every point, (B, M + 1)."""
    at = values.gather(-1, steps.levels)
    pairs = torch.stack([-at[..., :-1], at[..., 1:]], -1)  # differences would be rounded
    pairs = pairs.flatten(1, 2).gather(1, order.unsqueeze(-1).expand(*order.shape, 2))
    terms = torch.where((slopes > 0).unsqueeze(-1), pairs, 0.0).flatten(1)
    n = at.shape[1]
    return running_sums(torch.cat([at[..., 0], terms], -1))[:, n - 1 :: 2]


def _scaled(budgets: Tensor, shift: Tensor) -> Tensor:
    return times_power_of_two(budgets, -shift[:, None])


def _bounds(problem: AllocationProblem, slopes: Tensor, budgets: Tensor) -> Tensor:
    """Certified bounds (B, M + 1) on the objective at each budget, from the prices before and after each point."""
    points = budgets.shape[-1]
    prices = torch.cat([slopes, torch.zeros_like(budgets[:, :1])], -1)  # after each point
    places = torch.arange(points, device=budgets.device)
    if points > MAX_PRICES:
        places = (places[:MAX_PRICES] * (points - 1)) // (MAX_PRICES - 1)
    least = torch.stack([exact_sum(least_terms(problem, prices[:, [place]])) for place in places.tolist()], -1)
    least = least - 2.0 * EPS * least.abs()
    after = torch.searchsorted(places, torch.arange(points, device=budgets.device))
    bounds = []
    for knot in (after, (after - 1).clamp(min=0)):
        paid = prices[:, places[knot]] * budgets * (1.0 + 4.0 * EPS)
        bound = least[:, knot] - paid
        bounds.append(bound - 2.0 * EPS * bound.abs())
    return torch.maximum(*bounds)
