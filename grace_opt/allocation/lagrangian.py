"""Allocation by Lagrangian multipliers: steps of all hulls in order of slope until the budgets are met, then moves.

The steps solve the linear relaxation except for at most one step per binding budget; that step is left out, and
single-level moves use what is left of the budgets. Vectorised over instances and groups. Sources: Sinha & Zoltners,
Operations Research 27 (1979); Kellerer, Pferschy & Pisinger, Knapsack Problems (2004), chapter 11.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.steps import Hulls, lower_hulls, within_budget
from ..kernels.steps.reference import best_moves
from .budgets import cut
from .dual import nested_prices
from .problem import AllocationProblem


@dataclass(frozen=True)
class Found:
    """An allocation of every instance, and the prices that certify it.

    Attributes
    ----------
    levels : Tensor (B, n), int64
    prices : list of Tensor (B, P)
        Total price of each part, in the units of the scaled problem.
    steps : Hulls
    limit : Tensor (B,), bool
        Instances whose moves the time limit ended.
    """

    levels: Tensor
    prices: list[Tensor]
    steps: Hulls
    limit: Tensor


def solve(problem: AllocationProblem, deadline: float) -> Found:
    """Allocate every instance of a scaled problem.

    Complexity: O(n L² + n L log(n L)) per instance, and O(n L) for each round of moves.
    """
    steps = lower_hulls(problem.losses, problem.costs, problem.admissible)
    if (
        problem.exact
        and len(problem.families) == 1
        and problem.families[0].limits.shape[1] == 1
        and deadline == math.inf
    ):
        limits = problem.families[0].limits[:, 0]
        levels, price = within_budget(problem.losses, problem.costs, problem.admissible, limits, steps)
        prices = nested_prices(problem, [price[:, None]])
        return Found(levels, prices, steps, torch.zeros_like(price, dtype=torch.bool))
    # Sums of real costs are rounded. First as if that were in our favour: the bound has to allow for it. Where a budget
    # is then overdrawn in the last digit, the other way round.
    levels, thresholds = _taken(problem, steps, -1.0)
    kept = problem.keeps_budgets(levels)
    if not bool(kept.all()):
        levels = torch.where(kept[:, None], levels, _taken(problem, steps, 1.0)[0])
    levels, limit = moved(problem, levels, deadline)
    return Found(levels, nested_prices(problem, thresholds), steps, limit)


def _taken(problem: AllocationProblem, steps: Hulls, caution: float) -> tuple[Tensor, list[Tensor]]:
    """Levels after the steps that fit as a whole, and the slope at which each part is exhausted."""
    least = problem.at(problem.costs, steps.levels[..., 0])
    amount, full, thresholds = steps.cost, steps.slope > 0, []
    margin = caution * problem.rounding
    for family in problem.families:
        room = family.limits - problem.totals(family, least) - 4.0 * margin * family.limits.nan_to_num(posinf=0.0)
        amount, full, threshold = cut(family, steps.slope, amount, full, room, margin)
        thresholds.append(threshold)
    return steps.levels.gather(-1, full.sum(-1, keepdim=True)).squeeze(-1), thresholds


def moved(problem: AllocationProblem, levels: Tensor, deadline: float) -> tuple[Tensor, Tensor]:
    """Move single groups to better levels, off the hull too, until no such move keeps all budgets.

    Each round proposes for every group the level that saves most per cost of those that fit alone, and makes the best
    of these moves that fit together. Also returns the instances that the deadline stopped.
    """
    active = torch.ones_like(levels[:, 0], dtype=torch.bool)
    # What is left is rounded: moves may need a last digit more, until one of an instance proves too much.
    spare = 4.0 * problem.rounding
    while True:
        now = problem.at(problem.costs, levels)
        rooms = [f.limits - problem.totals(f, now) + spare * f.limits.nan_to_num(posinf=0.0) for f in problem.families]
        room = torch.stack([f.per_group(left) for f, left in zip(problem.families, rooms, strict=True)]).amin(0)
        extra = problem.costs - now.unsqueeze(-1)
        allowed = problem.admissible & (extra <= room.unsqueeze(-1)) & active[:, None, None]
        best, level = best_moves(problem.losses, extra, levels, allowed)
        if not bool((best > 0).any()):
            return levels, torch.zeros_like(active)
        if time.monotonic() >= deadline:
            return levels, (best > 0).flatten(1).any(-1)
        amount, full = extra.gather(-1, level).clamp(min=0.0).masked_fill(best <= 0, 0.0), best > 0
        for family, left in zip(problem.families, rooms, strict=True):
            amount, full, _ = cut(family, best, amount, full, left, problem.rounding)
        proposed = torch.where(full, level, levels.unsqueeze(-1)).squeeze(-1)
        kept = problem.keeps_budgets(proposed)
        active = active & torch.where(kept, (proposed != levels).any(-1), spare[:, 0] > 0)
        spare = spare.masked_fill(~kept[:, None], 0.0)
        levels = torch.where(kept[:, None], proposed, levels)
