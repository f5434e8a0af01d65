"""Allocation by Lagrangian multipliers: steps of all hulls in order of slope until the budgets are met, then moves.

The steps solve the linear relaxation except for at most one step per binding budget; that step is left out, and
single-level moves use what is left of the budgets. Vectorised over instances and groups. Sources: Sinha & Zoltners,
Operations Research 27 (1979); Kellerer, Pferschy & Pisinger, Knapsack Problems (2004), chapter 11.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from .budgets import cut
from .dual import nested_prices
from .hull import LARGEST_SLOPE, Steps, lower_hulls, slope
from .problem import AllocationProblem
from .sums import EPS


@dataclass(frozen=True)
class Found:
    """An allocation of every instance, and the prices that certify it.

    Attributes
    ----------
    levels : Tensor (B, n), int64
    prices : list of Tensor (B, P)
        Total price of each part, in the units of the scaled problem.
    steps : Steps
        The hulls.
    limit : Tensor (B,), bool
        Instances whose moves the time limit ended.
    """

    levels: Tensor
    prices: list[Tensor]
    steps: Steps
    limit: Tensor


def solve(problem: AllocationProblem, deadline: float) -> Found:
    """Allocate every instance of a scaled problem.

    Complexity: O(n L² + n L log(n L)) per instance, and O(n L) for each round of moves.
    """
    steps = lower_hulls(problem)
    least = problem.at(problem.costs, steps.levels[..., 0])
    amount, full, thresholds = steps.cost, steps.slope > 0, []
    for family in problem.families:
        room = family.limits - family.totals(least)
        if not problem.exact_costs:  # sums are then rounded: never let that overdraw a budget
            room = room - 4.0 * EPS * family.limits.nan_to_num(posinf=0.0)
        amount, full, threshold = cut(family, steps.slope, amount, full, room, problem.exact_costs)
        thresholds.append(threshold)
    levels = steps.levels.gather(-1, full.sum(-1, keepdim=True)).squeeze(-1)
    levels, limit = moved(problem, levels, deadline)
    return Found(levels, nested_prices(problem, thresholds), steps, limit)


def moved(problem: AllocationProblem, levels: Tensor, deadline: float) -> tuple[Tensor, Tensor]:
    """Move single groups to better levels, off the hull too, until no such move keeps all budgets.

    Each round proposes for every group the level that saves most per cost of those that fit alone, and makes the best
    of these moves that fit together. Also returns the instances that the deadline stopped.
    """
    active = torch.ones_like(levels[:, 0], dtype=torch.bool)
    while True:
        now = problem.at(problem.costs, levels)
        rooms = [family.limits - family.totals(now) for family in problem.families]
        room = torch.stack([f.per_group(left) for f, left in zip(problem.families, rooms, strict=True)]).amin(0)
        saved = problem.at(problem.losses, levels).unsqueeze(-1) - problem.losses
        extra = problem.costs - now.unsqueeze(-1)
        allowed = problem.admissible & (extra <= room.unsqueeze(-1)) & active[:, None, None]
        gain = torch.where(allowed & (saved > 0) & (extra <= 0), LARGEST_SLOPE, slope(saved, extra, allowed))
        best, level = gain.max(-1, keepdim=True)
        if not bool((best > 0).any()):
            return levels, torch.zeros_like(active)
        if time.monotonic() >= deadline:
            return levels, (best > 0).flatten(1).any(-1)
        amount, full = extra.gather(-1, level).clamp(min=0.0).masked_fill(best <= 0, 0.0), best > 0
        for family, left in zip(problem.families, rooms, strict=True):
            amount, full, _ = cut(family, best, amount, full, left, problem.exact_costs)
        proposed = torch.where(full, level, levels.unsqueeze(-1)).squeeze(-1)
        kept = problem.keeps_budgets(proposed)  # always, but for the last digit of rounded sums
        active = active & kept
        levels = torch.where(kept[:, None], proposed, levels)
