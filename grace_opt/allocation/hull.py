"""Lower convex hulls of (cost, loss), all groups at once: from the cheapest level on, the steepest step each time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._util.arrays import first_argmin
from .problem import AllocationProblem

#: Slopes are kept within these, so that prices times costs stay numbers.
LARGEST_SLOPE, SMALLEST_SLOPE = 2.0**1000, 2.0**-1000


@dataclass(frozen=True)
class Steps:
    """The hull of each group; S = L - 1 steps, fewer where the slope is 0.

    Attributes
    ----------
    levels : Tensor (B, n, S + 1), int64
        Level before the first step, and after each.
    cost : Tensor (B, n, S)
        Additional cost of each step, 0 where there is none.
    slope : Tensor (B, n, S)
        Loss saved per unit of cost; it never increases from step to step, 0 where there is none.
    """

    levels: Tensor
    cost: Tensor
    slope: Tensor


def lower_hulls(problem: AllocationProblem) -> Steps:
    """Return the steps of the lower convex hull of every group.

    Collinear levels are kept, for finer steps; of equal levels, the first. Complexity: O(L²) per group.
    """
    losses, costs = problem.losses, problem.costs
    out = ~problem.admissible
    cheapest = costs.masked_fill(out, torch.inf).amin(-1, keepdim=True)
    level = first_argmin(losses.masked_fill(out | (costs > cheapest), torch.inf))
    levels, added, slopes = [level], [], []
    bound = torch.full_like(costs[..., 0], LARGEST_SLOPE)
    for _ in range(losses.shape[-1] - 1):
        saved = problem.at(losses, level).unsqueeze(-1) - losses
        extra = costs - problem.at(costs, level).unsqueeze(-1)
        steps = slope(saved, extra, problem.admissible)
        steepest = steps.amax(-1, keepdim=True)
        step = first_argmin(extra.masked_fill((steps < steepest) | (steps == 0), torch.inf))
        exists = steepest[..., 0] > 0
        added.append(torch.where(exists, problem.at(extra, step), 0.0))
        bound = torch.minimum(bound, steepest[..., 0])  # rounding must not reverse the order of steps
        slopes.append(bound)
        level = torch.where(exists, step, level)
        levels.append(level)
    none = costs.new_zeros(*level.shape, 0)
    return Steps(
        torch.stack(levels, -1), torch.stack(added, -1) if added else none, torch.stack(slopes, -1) if slopes else none
    )


def slope(saved: Tensor, extra: Tensor, allowed: Tensor) -> Tensor:
    """Loss saved per unit of cost where both are positive and it is allowed, else 0."""
    useful = allowed & (saved > 0) & (extra > 0)
    return (saved / extra).clamp_(SMALLEST_SLOPE, LARGEST_SLOPE).masked_fill_(~useful, 0.0)
