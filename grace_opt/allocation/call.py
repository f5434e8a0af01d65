"""`allocate`: the public call, a multiple-choice knapsack with a certified bound."""

from __future__ import annotations

import time
from typing import Any, Never

import numpy as np
import torch

from .._util.names import refuse_unknown
from .._util.parameters import choice, flag, number
from ..errors import OptionError
from ..solution import Status
from . import exact, lagrangian
from .allocation import Allocation, relative_gap, tolerance
from .dual import dual_bound, multipliers
from .frontier import frontier
from .inputs import checked_problem
from .problem import AllocationProblem, times_power_of_two, unscale
from .sums import exact_sum

METHODS = ("lagrangian", "exact")
#: What to write in the place of an argument that is gone.
REMOVED = {"interaction": "Leave it out, and give W's diagonal as the losses of level 0."}


@np.errstate(under="ignore")  # whatever the caller has set
def allocate(
    losses: Any,
    costs: Any,
    budget: Any = None,
    *,
    parts: Any = None,
    least: Any = None,
    most: Any = None,
    path: bool = False,
    method: str = "lagrangian",
    time_limit: float | None = None,
    **unknown: Never,
) -> Allocation:
    r"""Choose one level for each group so that the losses sum to the least within a budget of costs.

    .. math:: \min_l \sum_{i=1}^{n} f_{i\,l_i} \quad \text{subject to} \quad \sum_{i=1}^{n} c_{i\,l_i} \le B

    Parameters
    ----------
    losses : array_like (..., n, L)
        Loss of each of L levels, for each of n groups; any sign. Leading dimensions are a batch.
    costs : array_like (L,), (n, L) or (..., n, L)
        Cost of each level, not negative, in any order. A level that costs more and loses more than others is never
        better and does no harm.
    budget : float, or array broadcastable to (...), optional
        Largest sum of costs: one number, or one per instance. May be infinite. Required unless `parts` is given.
    parts : list of (labels, limits), optional
        Further budgets: `labels`, n integers from 0 on, divide the groups into parts; `limits` has the largest cost of
        each part, a number or shape (P,) or (..., P). Several pairs must be nested, such as heads within layers; the
        overall `budget` contains them all.
    least, most : int, or int array (n,) or (..., n), optional
        Lowest and highest admissible level of each group, as indices into the last dimension.
    path : bool
        Also return the frontier over all budgets, `Allocation.path`. With a single budget only.
    method : {"lagrangian", "exact"}
        "lagrangian" is batched and fast, with a small gap. "exact" then closes the gap by dynamic programming, one
        instance after the other.
    time_limit : float, optional
        Seconds after which the best allocation so far is returned (Status.LIMIT). The relaxation is always solved,
        which takes O(n L²) per instance.
    **unknown
        Refused, with the argument that may be meant.

    Returns
    -------
    Allocation
        numpy in, numpy out; torch in, torch out on the same device. Computed in float64.

    Raises
    ------
    InfeasibleBudgetError
        If even the cheapest levels exceed a budget; its ``smallest`` is the smallest budget that can be kept.
    ProblemError, OptionError

    Notes
    -----
    "lagrangian" takes the steps of the groups' lower convex hulls in order of slope until the budgets are met, which
    solves the linear relaxation but for one step per binding budget; single-level moves then use what is left. Hence
    ``objective - lower_bound`` is at most the loss that one step saves, summed over the budgets that hold a step back:
    those with a positive multiplier and, where slopes are equal, parts within them. (Provided that slopes, relative to
    each other, fit into float64; the bound holds anyway.)

    A budget counts as kept if the sum of the costs, rounded to float64, is at most the limit: ten times 0.1 keeps a
    budget of 1.

    "exact" takes time and memory that depend on the gap and on the number of different sums of costs; it stops at the
    time limit, or when a step would need more than `grace_opt.allocation.exact.MAX_STATES` states (Status.LIMIT, too).

    References
    ----------
    Everett, Operations Research 11 (1963); Sinha & Zoltners, Operations Research 27 (1979); Kellerer, Pferschy &
    Pisinger, Knapsack Problems (2004), chapter 11.

    Examples
    --------
    Bits for three channels at 0, 2 or 4 bits each, 6 bits in all:

    >>> losses = [[9.0, 1.0, 0.1], [4.0, 0.5, 0.05], [1.0, 0.2, 0.02]]
    >>> best = allocate(losses, [0, 2, 4], 6)
    >>> best.levels.tolist(), float(best.objective), best.status.name
    ([2, 1, 0], 1.6, 'OPTIMAL')

    At most 2 bits for the first two together, and an infeasible budget:

    >>> allocate(losses, [0, 2, 4], 6, parts=[([0, 0, 1], [2, 6])]).levels.tolist()
    [1, 0, 2]
    >>> allocate(losses, [0, 2, 4], 5, least=1)
    Traceback (most recent call last):
    grace_opt.errors.InfeasibleBudgetError: budget=5.0 cannot be kept: the cheapest admissible levels cost 6.0. Give
    at least that, or lower least=.
    """
    refuse_unknown(allocate, unknown, REMOVED)
    began = time.monotonic()
    choice("method", method, METHODS)
    seconds = number("time_limit", time_limit, at_least=0, infinite=True, optional=True)
    deadline = float("inf") if seconds is None else began + seconds
    if flag("path", path) and (parts is not None or budget is None):
        raise OptionError("path=True is for a single budget: give budget=, and leave parts= out.")
    problem = checked_problem(losses, costs, budget, parts, least, most)
    found = lagrangian.solve(problem.scaled, deadline)
    bounds = dual_bound(problem.scaled, found.levels, found.prices)
    if method == "exact":
        *_, proved = _certified(problem, found.levels, bounds)
        found, bounds = exact.improve(problem.scaled, found, bounds, ~proved, deadline)
    return _answer(problem, found, bounds, method, path, began)


def _answer(
    problem: AllocationProblem, found: lagrangian.Found, bounds: torch.Tensor, method: str, path: bool, began: float
) -> Allocation:
    """Sum costs and losses, and say what is proved."""
    loss_shift, cost_shift = problem.shifts
    objective, bound, proved = _certified(problem, found.levels, bounds)
    names = [family.name for family in problem.families]
    costs = problem.at(problem.costs, found.levels)
    totals = [problem.totals(family, costs) for family in problem.families]
    shift = (loss_shift - cost_shift)[:, None]
    prices = [times_power_of_two(own, shift) for own in multipliers(problem.scaled, found.prices)]
    parts = [names.index(f"parts[{at}]") for at in range(len(names) - ("budget" in names))]
    whole = prices[names.index("budget")][:, 0] if "budget" in names else torch.zeros_like(objective)
    return Allocation(
        levels=problem.export(found.levels),
        cost=problem.export(costs.sum(-1) if problem.exact else exact_sum(costs)),
        objective=problem.export(objective),
        lower_bound=problem.export(bound),
        gap=problem.export(relative_gap(problem, found.levels, objective, bound)),
        status=_status(problem, proved, found.limit),
        multipliers=problem.export(whole),
        part_multipliers=tuple(problem.export(prices[at]) for at in parts),
        part_costs=tuple(problem.export(totals[at]) for at in parts),
        method=method,
        stats={"time": time.monotonic() - began},
        path=frontier(problem, found.steps) if path else None,
        problem=problem,
    )


def _certified(
    problem: AllocationProblem, levels: torch.Tensor, bounds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Objective, bound and whether it proves the objective optimal; `bounds` are those of the scaled problem."""
    objective = problem.objective(levels)
    bound = torch.minimum(unscale(bounds, problem.shifts[0]), objective)
    proved = objective - bound <= tolerance(problem, levels, objective)
    return objective, torch.where(proved, objective, bound) if problem.integer else bound, proved


def _status(problem: AllocationProblem, proved: torch.Tensor, limit: torch.Tensor) -> Any:
    """One Status, or an object array of them."""
    every = [
        Status.OPTIMAL if done else Status.LIMIT if stopped else Status.FEASIBLE
        for done, stopped in zip(proved.tolist(), limit.tolist(), strict=True)
    ]
    if not problem.batch_shape:
        return every[0]
    status = np.empty(len(every), dtype=object)
    status[:] = every
    return status.reshape(problem.batch_shape)
