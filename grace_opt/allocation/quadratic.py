r"""Allocation if groups at level 0 interact: prices, and for each price the best set of groups to drop.

.. math:: \min_{P,\,l} \; 1_P^\top W 1_P + \sum_{i \notin P} f_{i\,l_i}

At a price per unit of cost, every group outside P takes its best level from 1 on. What is left is a minimum-weight
induced subgraph of any size with linear terms: greedy, then exchanges. Each set found is allocated exactly as a problem
without interaction. When: channels with 0 bits, whose errors add up coherently. Sources: Everett, Operations Research
11 (1963), for the prices; GRACE (arXiv 2604.16983) for W.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from .._util.arrays import first_argmin
from . import lagrangian
from .dual import HUGE, dual_bound
from .lagrangian import Found
from .problem import AllocationProblem

#: Number of prices tried; factor between them until both sides of the budget are found.
PRICES, FACTOR = 12, 4.0
#: Number of neighbours of the best set that are allocated in a round of moves, and of such rounds.
NEIGHBOURS, ROUNDS = 8, 16
#: Changes below this share of the weights count as rounding.
SLACK = 2.0**-40


def solve(problem: AllocationProblem, deadline: float) -> tuple[Found, Tensor]:
    """Allocate every instance of a scaled problem with an interaction; never worse than without it.

    Returns
    -------
    found : Found
    bounds : Tensor (B,)
        Certified: where no weight between groups is negative, the bound without an interaction holds; else -inf.

    Notes
    -----
    Complexity: O(n³) for the exchanges at each price.
    """
    alone = replace(problem, interaction=None)
    apart = lagrangian.solve(alone, deadline)
    bounds = dual_bound(alone, apart.levels, apart.prices)
    W = interaction_of(problem)
    positive = ((W >= 0) | torch.eye(W.shape[-1], dtype=torch.bool, device=W.device)).flatten(1).all(-1)
    bounds = bounds.masked_fill(~positive, -torch.inf)
    best, value = apart.levels.clone(), _value(problem, apart.levels)
    sets, price = _sets_by_price(problem, apart, deadline)
    limit = torch.zeros_like(apart.limit)
    active = torch.arange(len(best), device=best.device)
    for number in range(ROUNDS):
        levels, found = best_of_sets(problem.rows(active), sets, deadline)
        lower = found < value[active]
        best[active[lower]], value[active[lower]] = levels[lower], found[lower]
        active = active[lower] if number else active  # the neighbours of every first answer are tried
        if not len(active):
            break
        if time.monotonic() >= deadline:
            limit[active] = True
            break
        sets = _neighbours(problem.rows(active), best[active] == 0, price[active])
    worse = problem.objective(best) > problem.objective(apart.levels)  # by rounding
    best = torch.where(worse.unsqueeze(-1), apart.levels, best)
    return replace(apart, levels=best, prices=[price.unsqueeze(-1)], limit=limit), bounds


def _value(problem: AllocationProblem, levels: Tensor) -> Tensor:
    """The objective (B,), rounded."""
    zero = (levels == 0).to(torch.float64)
    rows = (interaction_of(problem) * zero.unsqueeze(-2)).sum(-1)
    return (problem.at(problem.losses, levels) * (1.0 - zero) + rows * zero).sum(-1)


def best_of_sets(problem: AllocationProblem, sets: Tensor, deadline: float) -> tuple[Tensor, Tensor]:
    """Levels (B, n) and objective (B,) of the best of the sets (B, C, n) to drop; inf if none keeps the budget."""
    batch, count, n = sets.shape
    place = torch.arange(batch, device=sets.device).repeat_interleave(count).unsqueeze(-1)
    every = torch.cat([place, sets.flatten(0, 1).to(place)], -1)
    keys, inverse = torch.unique(every, dim=0, return_inverse=True)
    instances, dropped = problem.rows(keys[:, 0]), keys[:, 1:] > 0
    levels = lagrangian.solve(without_interaction(instances, dropped), deadline).levels
    value = _value(instances, levels).masked_fill(~instances.keeps_budgets(levels), torch.inf)
    value, first = value[inverse].reshape(batch, count).min(-1)
    return levels[inverse].reshape(batch, count, n)[torch.arange(batch, device=sets.device), first], value


def without_interaction(problem: AllocationProblem, dropped: Tensor) -> AllocationProblem:
    """The problem of the levels once the groups to drop (B, n) are known, less the weights between them."""
    zero = torch.arange(problem.losses.shape[-1], device=dropped.device) == 0
    admissible = problem.admissible & (dropped.unsqueeze(-1) == zero)
    return replace(problem, admissible=admissible, interaction=None)


def changed_costs(problem: AllocationProblem, price: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What each group (B, n) costs at a price (B,) besides W, and what may be dropped.

    Returns
    -------
    kept : Tensor
        Loss and priced cost of the best level from 1 on; of groups that must be dropped, the priced cost of level 0.
    gain : Tensor
        How much of that dropping the group saves.
    low, high : Tensor
        1 where the group must, and where it may be dropped; else 0.
    """
    priced = priced_costs(problem, price)
    dropped = priced[..., 0]
    levels = torch.nn.functional.pad(problem.losses + priced, (0, 1), value=torch.inf)[..., 1:]
    admissible = torch.nn.functional.pad(problem.admissible, (0, 1))[..., 1:]
    kept = levels.masked_fill(~admissible, torch.inf).amin(-1)
    low, high = ~admissible.any(-1), problem.admissible[..., 0]
    kept = torch.where(low, dropped, kept)
    return kept, kept - dropped, low.to(kept), high.to(kept)


def priced_costs(problem: AllocationProblem, price: Tensor) -> Tensor:
    """Costs (B, n, L) times prices (B,), at most `HUGE`: adding losses then gives numbers, and bounds only fall."""
    return (price[:, None, None] * problem.costs).clamp(max=HUGE)


def _sets_by_price(problem: AllocationProblem, apart: Found, deadline: float) -> tuple[Tensor, Tensor]:
    """Sets (B, C, n) to drop at prices around that which uses up the budget, and that price (B,)."""
    budget = problem.families[0].limits[:, 0]
    slopes = apart.steps.slope.flatten(1)
    start = slopes.amax(-1) if slopes.shape[-1] else torch.zeros_like(budget)
    start = torch.where(start > 0, start, 1.0)  # nothing is worth its cost apart
    price = torch.where(apart.prices[0][:, 0] > 0, apart.prices[0][:, 0], start)
    low, high = torch.zeros_like(price), torch.full_like(price, torch.inf)
    sets, now = [], torch.zeros_like(price)  # at first without a price: then nothing binds
    for number in range(PRICES):
        dropped = drop(problem, now)
        chosen = without_interaction(problem, dropped)
        priced = chosen.losses + priced_costs(chosen, now)
        levels = first_argmin(priced.masked_fill(~chosen.admissible, torch.inf))
        spent = problem.at(problem.costs, levels).sum(-1)
        sets.append(dropped)
        within = spent <= budget
        low, high = torch.where(within, low, now), torch.where(within, now, high)
        middle = torch.where(high.isinf(), low * FACTOR, torch.where(low > 0, low.sqrt() * high.sqrt(), high / FACTOR))
        now = torch.where(high == 0, 0.0, middle if number else price).clamp(max=HUGE)  # inf times a cost of 0 is nan
        if time.monotonic() >= deadline or bool((high == 0).all()):
            break
    return torch.stack(sets, 1), torch.where(high.isfinite(), high, now)


def drop(problem: AllocationProblem, price: Tensor) -> Tensor:
    """A set (B, n) of small weight less gains at a price (B,): greedy, the best size on its path, then exchanges."""
    W, (_, gain, low, high) = interaction_of(problem), changed_costs(problem, price)
    dropped, free = low > 0, high > low
    left = free.clone()
    rise = W.diagonal(dim1=-2, dim2=-1) - gain + 2.0 * (W * low.unsqueeze(-2)).sum(-1)
    total, rows = torch.zeros_like(gain[:, 0]), torch.arange(len(W), device=W.device)
    least, best = total.clone(), dropped.clone()
    for _ in range(int(free.sum(-1).max())):
        step, vertex = rise.masked_fill(~left, torch.inf).min(-1)
        exists = step.isfinite()
        total = total + step.masked_fill(~exists, 0.0)
        dropped[rows, vertex] |= exists
        left[rows, vertex] = False
        lower = exists & (total < least)
        least, best = torch.where(lower, total, least), torch.where(lower.unsqueeze(-1), dropped, best)
        rise = rise + 2.0 * W[rows, vertex]
    return _exchanged(W, gain, best, free)


def interaction_of(problem: AllocationProblem) -> Tensor:
    """W (B, n, n) of a problem that has one."""
    if problem.interaction is None:
        raise TypeError("the problem has no interaction")
    return problem.interaction


def changes(W: Tensor, gain: Tensor, dropped: Tensor, free: Tensor) -> Tensor:
    """What changing groups i and j, or i alone on the diagonal, adds to the weight less gains, (B, n, n)."""
    sign = torch.where(dropped, -1.0, 1.0).to(W)
    diagonal = W.diagonal(dim1=-2, dim2=-1)
    others = (W * dropped.unsqueeze(-2)).sum(-1) - torch.where(dropped, diagonal, 0.0)
    one = (sign * (diagonal - gain + 2.0 * others)).masked_fill(~free, torch.inf)
    both = one.unsqueeze(-1) + one.unsqueeze(-2) + 2.0 * sign.unsqueeze(-1) * sign.unsqueeze(-2) * W
    return both.diagonal_scatter(one, dim1=-2, dim2=-1)


def _exchanged(W: Tensor, gain: Tensor, dropped: Tensor, free: Tensor) -> Tensor:
    """Change one or two groups as long as that helps."""
    n = W.shape[-1]
    slack = SLACK * (W.diagonal(dim1=-2, dim2=-1).abs() + gain.abs()).amax(-1)
    dropped, active = dropped.clone(), torch.arange(len(W), device=W.device)
    for _ in range(4 * n):
        change, place = changes(W[active], gain[active], dropped[active], free[active]).flatten(1).min(-1)
        helps = change < -slack[active]
        active, place = active[helps], place[helps]
        if not len(active):
            break
        dropped[active] = _toggled(dropped[active], place, n)
    return dropped


def _toggled(dropped: Tensor, place: Tensor, n: int) -> Tensor:
    """Sets (..., n) with the one or two groups at a place of `changes` the other way round."""
    groups = torch.arange(n, device=place.device)
    return (
        dropped
        ^ (groups == (place // n).unsqueeze(-1))
        ^ ((groups == (place % n).unsqueeze(-1)) & (place // n != place % n).unsqueeze(-1))
    )


def _neighbours(problem: AllocationProblem, dropped: Tensor, price: Tensor) -> Tensor:
    """The sets (B, C, n) that differ in one or two groups and cost least at the price."""
    W, (_, gain, low, high) = interaction_of(problem), changed_costs(problem, price)
    n = W.shape[-1]
    change = changes(W, gain, dropped, high > low)
    upper = torch.ones_like(change[0], dtype=torch.bool).triu()
    count = min(NEIGHBOURS, n * n)
    places = change.masked_fill(~upper, torch.inf).flatten(1).topk(count, largest=False)
    moved = _toggled(dropped.unsqueeze(1).expand(-1, count, -1), places.indices, n)
    return torch.where(places.values.isfinite().unsqueeze(-1), moved, dropped.unsqueeze(1))
