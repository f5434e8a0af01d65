"""Hulls, steps and moves in torch operations, for any device: the definition of the compiled loops."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._util.arrays import first_argmin

#: Slopes are kept within these, so that prices times costs stay numbers.
LARGEST_SLOPE, SMALLEST_SLOPE = 2.0**1000, 2.0**-1000


def lower_hulls(losses: Tensor, costs: Tensor, admissible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `grace_opt.kernels.steps.lower_hulls`."""
    out = ~admissible
    cheapest = costs.masked_fill(out, torch.inf).amin(-1, keepdim=True)
    level = first_argmin(losses.masked_fill(out | (costs > cheapest), torch.inf))
    levels, added, slopes = [level], [], []
    bound = torch.full_like(costs[..., 0], LARGEST_SLOPE)
    for _ in range(losses.shape[-1] - 1):
        saved = _at(losses, level).unsqueeze(-1) - losses
        extra = costs - _at(costs, level).unsqueeze(-1)
        steps = slope(saved, extra, admissible)
        steepest = steps.amax(-1, keepdim=True)
        # Of steps as steep, the shortest; of levels that cost the same, whose slopes may round to the same, the best.
        others = (steps < steepest) | (steps == 0)
        shortest = extra.masked_fill(others, torch.inf).amin(-1, keepdim=True)
        step = first_argmin(losses.masked_fill(others | (extra > shortest), torch.inf))
        exists = steepest[..., 0] > 0
        added.append(torch.where(exists, _at(extra, step), 0.0))
        bound = torch.minimum(bound, steepest[..., 0])  # rounding must not reverse the order of steps
        slopes.append(bound)
        level = torch.where(exists, step, level)
        levels.append(level)
    none = costs.new_zeros(*level.shape, 0)
    return (
        torch.stack(levels, -1),
        torch.stack(added, -1) if added else none,
        torch.stack(slopes, -1) if slopes else none,
    )


def slope(saved: Tensor, extra: Tensor, allowed: Tensor) -> Tensor:
    """Loss saved per unit of cost where both are positive and it is allowed, else 0."""
    useful = allowed & (saved > 0) & (extra > 0)
    return (saved / extra).clamp_(SMALLEST_SLOPE, LARGEST_SLOPE).masked_fill_(~useful, 0.0)


def best_moves(losses: Tensor, extra: Tensor, now: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best gain of each group and its level, ``(B, n, 1)``: what is saved for nothing comes first.

    Parameters
    ----------
    losses : Tensor (B, n, L)
    extra : Tensor (B, n, L)
        Cost of each level above the present one's.
    now : Tensor (B, n)
        Present levels.
    allowed : Tensor (B, n, L), bool
    """
    saved = _at(losses, now).unsqueeze(-1) - losses
    gain = torch.where(allowed & (saved > 0) & (extra <= 0), LARGEST_SLOPE, slope(saved, extra, allowed))
    best, level = gain.max(-1, keepdim=True)
    return best, level


def within_budget(
    losses: Tensor,
    costs: Tensor,
    admissible: Tensor,
    limits: Tensor,
    hull_levels: Tensor,
    hull_cost: Tensor,
    hull_slope: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `grace_opt.kernels.steps.within_budget`.

    Parameters
    ----------
    losses, costs, admissible : Tensor (B, n, L)
    limits : Tensor (B,)
    hull_levels : Tensor (B, n, L), int64
    hull_cost, hull_slope : Tensor (B, n, L - 1)
    """
    slack = limits - _at(costs, hull_levels[..., 0]).sum(-1)
    taken, price = _cut(hull_slope.flatten(1), hull_cost.flatten(1), slack)
    count = (taken.view(hull_slope.shape) & (hull_slope > 0)).sum(-1, keepdim=True)
    levels = hull_levels.gather(-1, count).squeeze(-1)
    active = torch.ones_like(slack, dtype=torch.bool)
    while True:
        spent = _at(costs, levels)
        slack, extra = limits - spent.sum(-1), costs - spent.unsqueeze(-1)
        allowed = admissible & (extra <= slack[:, None, None]) & active[:, None, None]
        best, level = best_moves(losses, extra, levels, allowed)
        if not bool((best > 0).any()):
            return levels, price
        amount = extra.gather(-1, level).clamp(min=0.0).masked_fill(best <= 0, 0.0)
        made = _cut(best[..., 0], amount[..., 0], slack)[0] & (best[..., 0] > 0)
        active = made.any(-1)
        levels = torch.where(made, level[..., 0], levels)


def _cut(steep: Tensor, size: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """Return the steps (B, m) that fit, the steepest first, and the price."""
    if not steep.shape[-1]:
        return torch.zeros_like(steep, dtype=torch.bool), torch.zeros_like(slack)
    steep, order = steep.sort(dim=-1, descending=True, stable=True)
    size = size.gather(-1, order)
    end, left = size.cumsum(-1), slack[:, None]
    fits = end <= left
    rest = (left - (end - size)).clamp(min=0.0).minimum(size)
    inside, out = fits & (size > 0), ~fits & (size > 0)
    first = steep.masked_fill(~out, 0.0).amax(-1)
    last = steep.masked_fill(~inside, torch.inf).amin(-1)
    used_up = (first > 0) & last.isfinite() & (rest.masked_fill(~out, 0.0).amax(-1) == 0)
    return torch.empty_like(fits).scatter_(-1, order, fits), torch.where(used_up, 0.5 * (first + last), first)


def _at(values: Tensor, levels: Tensor) -> Tensor:
    return values.gather(-1, levels.unsqueeze(-1)).squeeze(-1)
