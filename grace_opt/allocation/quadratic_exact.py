"""Exact allocation with an interaction: every set of groups to drop, bounded, and allocated exactly if it may be best.

When: up to `MAX_FREE` groups that may be dropped or kept; small cases, and an oracle for larger ones' methods.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import OptionError
from . import exact, lagrangian
from .dual import dual_bound
from .lagrangian import Found
from .problem import AllocationProblem
from .quadratic import interaction_of, without_interaction
from .sums import EPS, exact_sum

#: Largest number of groups that may be dropped or kept; number of sets that are bounded at a time.
MAX_FREE, CHUNK = 16, 1024


def check_size(problem: AllocationProblem) -> None:
    """Raise OptionError if there are too many sets to enumerate."""
    free = problem.admissible[..., 0] & problem.admissible[..., 1:].any(-1)
    most = int(free.sum(-1).max())
    if most > MAX_FREE:
        raise OptionError(
            f"method='exact' with interaction= enumerates the sets of dropped groups: {most} groups may be dropped or "
            f"kept, and at most {MAX_FREE} are possible. Write method='lagrangian', or fix some by least= and most=."
        )


def improve(
    problem: AllocationProblem, found: Found, bounds: Tensor, open_: Tensor, deadline: float
) -> tuple[Found, Tensor]:
    """Replace allocations by optimal ones, where `open_`; as `exact.improve`. Scaled problem."""
    levels, bounds, limit = found.levels.clone(), bounds.clone(), torch.zeros_like(found.limit)
    for b in open_.nonzero().flatten().tolist():
        levels[b], bound, limit[b] = _instance(problem.instance(b), levels[b], deadline)
        if not bool(limit[b]):
            bounds[b] = torch.maximum(bounds[b], bound)
    return replace(found, levels=levels, limit=limit), bounds


def _instance(problem: AllocationProblem, levels: Tensor, deadline: float) -> tuple[Tensor, Tensor, bool]:
    """The best levels of one instance, a bound, and whether time was up: then the bound does not hold."""
    W, admissible = interaction_of(problem)[0], problem.admissible[0]
    forced = ~admissible[:, 1:].any(-1)
    places = (admissible[:, 0] & ~forced).nonzero().flatten()
    value = problem.objective(levels.unsqueeze(0))[0]
    lowest = value.clone()
    for first in range(0, 1 << len(places), CHUNK):
        if time.monotonic() >= deadline:
            return levels, lowest, True
        numbers = torch.arange(first, min(first + CHUNK, 1 << len(places)), device=W.device)
        sets = forced.repeat(len(numbers), 1)
        sets[:, places] = (numbers.unsqueeze(-1) >> torch.arange(len(places), device=W.device)) & 1 > 0
        pairs = (sets.unsqueeze(-1) & sets.unsqueeze(-2)) & ~torch.eye(len(W), dtype=torch.bool, device=W.device)
        weights = torch.where(pairs, W, 0.0).flatten(1)
        rows = problem.rows(torch.zeros_like(numbers))
        apart = without_interaction(rows, sets)
        cheapest = apart.costs.masked_fill(~apart.admissible, torch.inf).amin(-1)
        possible = apart.families[0].totals(cheapest)[:, 0] <= apart.families[0].limits[:, 0]
        apart, weights = apart.rows(possible.nonzero().flatten()), weights[possible]
        if not len(weights):
            continue
        solved = lagrangian.solve(apart, deadline)
        bounds = dual_bound(apart, solved.levels, solved.prices)
        solved, bounds = exact.improve(apart, solved, bounds, _together(bounds, weights) < value, deadline)
        if bool(solved.limit.any()):
            return levels, lowest, True
        lowest = torch.minimum(lowest, _together(bounds, weights).amin())
        objectives = problem.rows(torch.zeros(len(weights), dtype=torch.int64, device="cpu")).objective(solved.levels)
        if bool((objectives < value).any()):
            best = objectives.argmin()
            levels, value = solved.levels[best], objectives[best]
    return levels, lowest, False


def _together(bounds: Tensor, weights: Tensor) -> Tensor:
    """Certified bounds plus the weights between channels without bits, rounded down: the sum is exact, then rounded."""
    total = exact_sum(torch.cat([weights, bounds[:, None]], dim=1))
    return total - 2.0 * EPS * total.abs()
