r"""The Lagrangian's lower bound, certified: it holds for any prices, in spite of rounding.

.. math:: \sum_i \min_l (f_{il} + T_i c_{il}) - \sum_p \mu_p B_p

with multipliers :math:`\mu_p \ge 0` and :math:`T_i` the sum of those of the parts that hold group i. Source: Everett,
Operations Research 11 (1963).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .problem import AllocationProblem
from .sums import EPS, exact_sum

#: Below this, products lose digits; scaled losses are far above.
_TINY = 2.0**-1060
#: A priced cost beyond this counts as this, which only lowers the bound.
HUGE = 2.0**1020


def nested_prices(problem: AllocationProblem, thresholds: Sequence[Tensor]) -> list[Tensor]:
    """Total price of each part, its own and those of the parts that contain it, from where each is exhausted."""
    total = [thresholds[-1]]
    for own, parent in zip(reversed(thresholds[:-1]), reversed(problem.parents), strict=True):
        total.insert(0, torch.maximum(own, total[0][:, parent]))
    return total


def multipliers(problem: AllocationProblem, prices: Sequence[Tensor]) -> list[Tensor]:
    """The price of each part's own limit."""
    above = [price[:, parent] for price, parent in zip(prices[1:], problem.parents, strict=True)]
    return [price - other for price, other in zip(prices, [*above, torch.zeros_like(prices[-1])], strict=True)]


def least_terms(problem: AllocationProblem, price: Tensor) -> Tensor:
    """Lower ends of ``min_l (f_l + price c_l)`` per group; price (..., B, n)."""
    priced = (price.unsqueeze(-1) * problem.costs).clamp(max=HUGE)
    size = problem.losses.abs() + priced
    low = (problem.losses + priced) - (2.0 * EPS * size + _TINY)
    return low.masked_fill(~problem.admissible, torch.inf).amin(-1)


def dual_bound(problem: AllocationProblem, levels: Tensor, prices: Sequence[Tensor]) -> Tensor:
    """Certified lower bound (B,) at total prices per part; a `problem` that is scaled.

    Computed as the objective of an allocation, less what each group could still gain at the prices, less what the
    allocation leaves of the budgets: with an optimal allocation, there is nothing to subtract and nothing to round.

    Parameters
    ----------
    problem : AllocationProblem
    levels : Tensor (B, n)
        Any allocation within the budgets; the better, the smaller the rounding.
    prices : sequence of Tensor (B, P)
        Total price of each part, by partition.

    Notes
    -----
    A budget counts as kept if the sum of costs, rounded, is at most the limit: the bound allows for that.
    """
    now, spent = problem.at(problem.losses, levels), problem.at(problem.costs, levels)
    saved, extra = now.unsqueeze(-1) - problem.losses, problem.costs - spent.unsqueeze(-1)
    price = problem.families[0].per_group(prices[0]).unsqueeze(-1)
    paid = (price * extra).clamp(max=HUGE)
    rounding = 2.0 * EPS * (saved.abs() + paid.abs()) + _TINY * ((extra != 0) & (price > 0))
    gain = (saved - paid + rounding).masked_fill(~problem.admissible, 0.0).amax(-1).clamp(min=0.0)
    terms = [now, -gain]
    for family, own in zip(problem.families, multipliers(problem, prices), strict=True):
        left = (
            family.limits
            - problem.totals(family, spent)
            + 2.0 * problem.rounding * family.limits.nan_to_num(posinf=0.0)
        )
        terms.append(torch.where(own > 0, -own * left * (1.0 + 4.0 * EPS), 0.0))
    every = torch.cat(terms, -1)
    total = exact_sum(every.nan_to_num(neginf=0.0))
    rounded = (every[:, levels.shape[-1] :] != 0).any(-1)
    total = total - 2.0 * EPS * total.abs() * rounded
    return total.masked_fill(every.isinf().any(-1), -torch.inf)
