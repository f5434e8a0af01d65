"""Exact allocation: dynamic programming over Pareto fronts of (cost, loss), part by part.

What the Lagrangian leaves open is decided by enumeration: a level, or a partial allocation, whose reduced loss exceeds
the gap is in no better allocation and is dropped, and of the rest only those that no other beats in cost and loss stay.
Any real costs; nested budgets. When: small instances, and larger ones whose gap is small. Sources: Nemhauser &
Ullmann, Management Science 15 (1969); Pisinger, European Journal of Operational Research 83 (1995).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .dual import HUGE
from .lagrangian import Found
from .problem import AllocationProblem
from .sums import EPS

#: Largest number of partial allocations that one step may look at; beyond, the search stops as at a time limit.
MAX_STATES = 2**23
#: So many are looked at between two looks at the clock.
STATES_AT_ONCE = 2**19

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class _StoppedError(Exception):
    """The search ran out of time or of `MAX_STATES`."""


@dataclass(frozen=True)
class _Front:
    """Partial allocations of some groups, none beaten in both cost and loss; cost increases, loss decreases.

    `reduced` is the sum of the reduced losses. `origin` says how each entry was made: (group, levels), or
    (front, front, its entries, its entries).
    """

    cost: Any  # int64, or float64 where that is too short
    loss: Any
    reduced: Floats
    origin: tuple[Any, ...]


def improve(
    problem: AllocationProblem, found: Found, bounds: Tensor, open_: Tensor, deadline: float
) -> tuple[Found, Tensor]:
    """Replace allocations by optimal ones, where `open_`; also returns their certified bounds (B,). Scaled problem.

    Where the search stops early, the allocation and the bound are those found before, and `Found.limit` is set.
    """
    levels, bounds, limit = found.levels.clone(), bounds.clone(), torch.zeros_like(found.limit)
    for b in open_.nonzero().flatten().tolist():
        prices = [price[b : b + 1] for price in found.prices]
        try:
            levels[b : b + 1], bounds[b] = _instance(
                problem.instance(b), levels[b : b + 1], prices, float(bounds[b]), deadline
            )
        except _StoppedError:
            limit[b] = True
    return replace(found, levels=levels, limit=limit), bounds


def _instance(
    problem: AllocationProblem, levels: Tensor, prices: list[Tensor], bound: float, deadline: float
) -> tuple[Tensor, float]:
    """The optimum of one instance and a certified bound on it."""
    value = float(problem.objective(levels))
    if value <= bound:
        return levels, bound
    losses, costs, allowed = (x[0].cpu().numpy() for x in (problem.losses, problem.costs, problem.admissible))
    price = problem.families[0].per_group(prices[0])[0].cpu().numpy()[:, None]
    with np.errstate(over="ignore"):
        paid = np.minimum(price * costs, HUGE)
    least = np.where(allowed, losses + paid, np.inf).min(-1, keepdims=True)
    reduced, size = losses + paid - least, np.abs(losses) + paid
    open_gap = value - bound
    kept = allowed & (reduced - 8.0 * EPS * size <= 2.0 * open_gap)  # no other level is in a better allocation
    n = len(losses)
    rounding = 8.0 * (n + 1) * EPS * float(np.where(kept, size, 0.0).max(-1).sum())
    lost, loss_unit = _multiples(np.where(kept, losses, 0.0))
    spent, cost_unit = _multiples(np.where(kept, costs, 0.0))
    search = _Search(problem, _limits(problem, cost_unit), open_gap + rounding, deadline)
    fronts = []
    search.look_at_the_clock()
    for i, places in enumerate(map(np.flatnonzero, kept)):
        fronts.append(search.pareto(spent[i, places], lost[i, places], reduced[i, places], (i, places)))
    done = search.fronts(fronts)
    if any(len(front.cost) == 0 for front in done):
        return levels, bound  # rounding has hidden everything, the present allocation included
    # What the search dropped is no better than `value`.
    if loss_unit:
        total = float(sum(int(front.loss[-1]) for front in done) * loss_unit)
    else:
        size = np.where(kept, np.abs(losses), 0.0)
        total = math.fsum(front.loss[-1] for front in done) - (n + 1) * EPS * float(size.max(-1).sum())
    best = levels
    for front in done:
        # Rounding may hide that an entry overdraws a budget: its loss is part of a bound, but it is not an answer.
        for entry in reversed(range(len(front.cost))):
            proposed = _with_levels(best, front, entry)
            if bool(problem.keeps_budgets(proposed)):
                best = proposed if float(problem.objective(proposed)) < float(problem.objective(best)) else best
                break
    return best, max(bound, min(total, float(problem.objective(best))))


def _multiples(values: Floats) -> tuple[Any, Fraction | None]:
    """Values as multiples of a power of two, in int64, so that sums are exact; as they are if int64 is too short."""
    mantissa, exponent = np.frexp(values)
    digits = (mantissa * 2.0**53).astype(np.int64)
    lowest = exponent - 53 + np.frexp((digits & -digits).astype(float))[1] - 1
    least = int(lowest[digits != 0].min(initial=exponent.max()))
    if int(exponent.max()) - least + len(values).bit_length() > 62:
        return values, None
    shift = exponent - 53 - least
    whole = np.where(shift >= 0, digits << np.clip(shift, 0, 63), digits >> np.clip(-shift, 0, 63))
    return whole, Fraction(2) ** least


def _limits(problem: AllocationProblem, unit: Fraction | None) -> list[list[Any]]:
    """Limits in multiples of the unit of costs; without one, with a margin for the rounding of sums."""
    limits = [family.limits[0].tolist() for family in problem.families]
    if unit is None:
        margin = 1.0 + 8.0 * (len(problem.families[0].labels) + 1) * EPS
        return [[limit * margin for limit in family] for family in limits]
    return [[_largest_multiple(limit, unit) for limit in family] for family in limits]


def _largest_multiple(limit: float, unit: Fraction) -> int:
    """How many units are at most the limit when their sum is rounded to float64."""
    if math.isinf(limit):
        return 2**63
    halfway = (Fraction(limit) + Fraction(math.nextafter(limit, math.inf))) / 2
    count = int(halfway // unit)
    return count if float(count * unit) <= limit else count - 1


@dataclass(frozen=True)
class _Search:
    """Merges fronts within the limits of one instance."""

    problem: AllocationProblem
    limits: list[list[Any]]
    gap: float
    deadline: float

    def fronts(self, fronts: list[_Front]) -> list[_Front]:
        """Merge the fronts of groups, in parts of the finest partition first: one front per part of the coarsest."""
        labels = self.problem.families[0].labels.tolist()
        nodes = [[front for front, own in zip(fronts, labels, strict=True) if own == part] for part in set(labels)]
        names = list(set(labels))
        for at, limits in enumerate(self.limits):
            done = [self.merged(node, limits[name]) for node, name in zip(nodes, names, strict=True)]
            if at < len(self.problem.parents):
                parent = self.problem.parents[at].tolist()
                above = [parent[name] for name in names]
                names = list(dict.fromkeys(above))
                nodes = [[front for front, own in zip(done, above, strict=True) if own == name] for name in names]
        return done

    def merged(self, fronts: list[_Front], limit: Any) -> _Front:
        """All sums of one entry of each front that cost at most the limit, smallest fronts first."""
        total, *others = sorted(fronts, key=lambda front: len(front.cost))
        if not len(total.cost):
            return total
        spare = limit - sum(front.cost[0].item() for front in others)  # the others cost at least the rest
        total = self.within(total, spare)
        for front in others:
            spare += front.cost[0].item()
            total = self.merge(total, front, spare)
        return total

    def merge(self, a: _Front, b: _Front, limit: Any) -> _Front:
        """Sums of an entry of `a` and one of `b`."""
        if len(a.cost) * len(b.cost) > MAX_STATES:
            raise _StoppedError
        height = max(1, STATES_AT_ONCE // max(len(b.cost), 1))
        pieces = []
        for first in range(0, max(len(a.cost), 1), height):
            self.look_at_the_clock()
            rows = slice(first, first + height)
            cost = np.add.outer(a.cost[rows], b.cost).ravel()
            reduced = np.add.outer(a.reduced[rows], b.reduced).ravel()
            kept = np.flatnonzero((reduced <= self.gap) & (cost <= limit))
            left, right = np.divmod(kept, max(len(b.cost), 1))
            left += first
            pieces.append(self.pareto(cost[kept], a.loss[left] + b.loss[right], reduced[kept], (a, b, left, right)))
        if len(pieces) == 1:
            return pieces[0]
        self.look_at_the_clock()
        cost, loss, reduced = (np.concatenate([getattr(x, of) for x in pieces]) for of in ("cost", "loss", "reduced"))
        left, right = (np.concatenate(entries) for entries in zip(*(x.origin[2:] for x in pieces), strict=True))
        return self.pareto(cost, loss, reduced, (a, b, left, right))

    def look_at_the_clock(self) -> None:
        """Raise `_StoppedError` if time is up."""
        if time.monotonic() >= self.deadline:
            raise _StoppedError

    def within(self, front: _Front, limit: Any) -> _Front:
        """The entries that cost at most the limit."""
        if not len(front.cost) or front.cost[-1] <= limit:
            return front
        return _taken(front, np.flatnonzero(front.cost <= limit))

    def pareto(self, cost: Any, loss: Any, reduced: Floats, origin: tuple[Any, ...]) -> _Front:
        """The entries that no other beats in cost and loss, by increasing cost."""
        order = np.lexsort((loss, cost))
        falling = loss[order]
        lower = np.ones(len(order), bool)
        lower[1:] = falling[1:] < np.minimum.accumulate(falling)[:-1]
        return _taken(_Front(cost, loss, reduced, origin), order[lower])


def _taken(front: _Front, entries: Integers) -> _Front:
    """Some entries of a front, in this order."""
    *whole, last = front.origin if len(front.origin) == 2 else (*front.origin[:2], front.origin[2:])
    picked = (last[entries],) if len(front.origin) == 2 else tuple(one[entries] for one in last)
    return _Front(front.cost[entries], front.loss[entries], front.reduced[entries], (*whole, *picked))


def _with_levels(levels: Tensor, front: _Front, entry: int) -> Tensor:
    """The levels (1, n) with those of one entry put in."""
    levels, pending = levels.clone(), [(front, entry)]
    while pending:
        front, entry = pending.pop()
        if len(front.origin) == 2:
            group, kept = front.origin
            levels[0, group] = int(kept[entry])
        else:
            a, b, left, right = front.origin
            pending += [(a, int(left[entry])), (b, int(right[entry]))]
    return levels
