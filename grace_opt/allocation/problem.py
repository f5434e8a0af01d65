"""`AllocationProblem`: validated losses, costs, admissible levels and budgets, scaled for the solvers.

Losses and costs are scaled by powers of two, separately for each instance, so that slopes of any inputs stay within
float64's range; nothing is rounded by that.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._util.arrays import Backend
from .budgets import Budgets, parents
from .sums import EPS, exact_sum

#: Binary exponents beyond this one are never produced by scaling.
_LARGEST_EXPONENT = 1000
#: Nor does scaling lower anything below this exponent, where float64 loses digits.
_SMALLEST_EXPONENT = -1000


@dataclass(frozen=True, eq=False)
class AllocationProblem:
    """A batch of multiple-choice knapsacks with nested budgets; B instances, n groups, L levels.

    Attributes
    ----------
    losses, costs : Tensor (B, n, L), float64
        As given.
    admissible : Tensor (B, n, L), bool
        Levels that may be chosen.
    families : tuple of Budgets
        Nested partitions of the groups, from the finest to the coarsest.
    unit : Tensor (B,), float64
        The power of two of which all costs of an instance are multiples, if their sums are then never rounded: 1 for
        whole numbers, 1/4 for quarters. 0 if sums may be rounded.
    integer : bool
        Whether losses were given as integers; objectives then differ by whole steps.
    batch_shape : tuple of int
        The leading dimensions of the input.
    backend : Backend
        The user's kind of array.
    """

    losses: Tensor
    costs: Tensor
    admissible: Tensor
    families: tuple[Budgets, ...]
    unit: Tensor
    integer: bool
    batch_shape: tuple[int, ...]
    backend: Backend

    @cached_property
    def parents(self) -> tuple[Tensor, ...]:
        """For each partition but the coarsest, the part of the next one in which each of its parts lies."""
        return tuple(parents(fine, coarse) for fine, coarse in itertools.pairwise(self.families))

    @cached_property
    def rounding(self) -> Tensor:
        """Relative rounding error of an addition of costs, (B, 1): 0 if nothing is rounded."""
        return torch.where(self.unit > 0, 0.0, EPS).to(torch.float64)[:, None]

    @cached_property
    def exact(self) -> bool:
        """Whether no sum of costs is rounded."""
        return bool((self.unit > 0).all())

    def totals(self, family: Budgets, costs: Tensor) -> Tensor:
        """Sum of the costs (B, n) in each part, (B, P)."""
        return family.totals(costs, rounded=not self.exact)

    def at(self, values: Tensor, levels: Tensor) -> Tensor:
        """Entry of (B, n, L) at one level per group, (B, n)."""
        return values.gather(-1, levels.unsqueeze(-1)).squeeze(-1)

    def objective(self, levels: Tensor) -> Tensor:
        """Sum of the losses, (B,), exact up to the last digit."""
        return exact_sum(self.at(self.losses, levels))

    def keeps_budgets(self, levels: Tensor) -> Tensor:
        """Whether every part of every partition keeps its limit, (B,)."""
        costs = self.at(self.costs, levels)
        return torch.stack([(self.totals(f, costs) <= f.limits).all(-1) for f in self.families]).all(0)

    @cached_property
    def shifts(self) -> tuple[Tensor, Tensor]:
        """Binary exponents (B,) by which losses and costs are lowered in `scaled`."""
        return _middle_exponent(self.losses), _middle_exponent(self.costs)

    @cached_property
    def scaled(self) -> AllocationProblem:
        """The same problem with losses and costs divided by ``2**shifts``, which is exact."""
        down, lower = (-shift[:, None, None] for shift in self.shifts)
        limits = [_multiple(f.limits, self.unit[:, None]) for f in self.families]
        families = tuple(
            Budgets(f.name, f.labels, times_power_of_two(limit, lower[:, :, 0]), f.tables)
            for f, limit in zip(self.families, limits, strict=True)
        )
        losses, costs = times_power_of_two(self.losses, down), times_power_of_two(self.costs, lower)
        unit = times_power_of_two(self.unit, lower[:, 0, 0])
        return replace(self, losses=losses, costs=costs, families=families, unit=unit)

    def instance(self, b: int) -> AllocationProblem:
        """Instance b as a batch of one."""
        families = tuple(Budgets(f.name, f.labels, f.limits[b : b + 1], f.tables) for f in self.families)
        losses, costs, admissible, unit = (
            values[b : b + 1] for values in (self.losses, self.costs, self.admissible, self.unit)
        )
        return AllocationProblem(losses, costs, admissible, families, unit, self.integer, (), self.backend)

    def export(self, values: Tensor) -> Any:
        """Return (B, …) in the user's batch shape and kind of array."""
        return self.backend.export(values.reshape((*self.batch_shape, *values.shape[1:])))


def common_unit(costs: Tensor) -> Tensor:
    """`AllocationProblem.unit` of costs (B, n, L)."""
    mantissa, exponent = costs.frexp()
    digits = (mantissa * 2.0**53).to(torch.int64)
    last = (digits & -digits).to(torch.float64).frexp().exponent - 1 + exponent - 53  # of the lowest bit
    least = last.masked_fill(digits == 0, 1000).flatten(1).amin(-1).to(torch.int64)
    unit = times_power_of_two(torch.ones_like(costs[:, 0, 0]), least.clamp(-1000, 1000))
    return torch.where((costs.amax(-1).sum(-1) < unit * 2.0**53) & (least >= -1000), unit, 0.0)


def _multiple(limits: Tensor, unit: Tensor) -> Tensor:
    """The largest multiple of the unit up to each limit: sums of costs never use the rest."""
    floor = (limits / unit).floor()
    return torch.where((unit > 0) & (floor.abs() < 2.0**53), floor * unit, limits)


def times_power_of_two(values: Tensor, exponent: Tensor) -> Tensor:
    """``values * 2**exponent`` for int64 exponents between -2200 and 2200, without overflow on the way."""
    third = exponent // 3  # powers of two beyond 2**1023 are no numbers
    return values * _power_of_two(third) * _power_of_two(third) * _power_of_two(exponent - 2 * third)


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2.0**exponent`` from its bits, exact on every device."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _middle_exponent(values: Tensor) -> Tensor:
    """The exponent in the middle of those of nonzero values, (B,); dividing by its power of two is exact."""
    exponent, nonzero = values.frexp().exponent.flatten(1), values.flatten(1) != 0
    high = exponent.masked_fill(~nonzero, -(2**20)).amax(-1)
    low = exponent.masked_fill(~nonzero, 2**20).amin(-1)
    middle = (high + low) // 2
    # Shift less, or not at all, where the range is too wide for both ends.
    middle = middle.maximum(high - _LARGEST_EXPONENT).minimum((low - _SMALLEST_EXPONENT).clamp(min=0))
    return torch.where(high >= low, middle, 0).to(torch.int64)


def unscale(values: Tensor, exponent: Tensor) -> Tensor:
    """Multiply (B, …) by ``2**exponent``, rounding down: for lower bounds."""
    wide = exponent.reshape(-1, *[1] * (values.ndim - 1))
    found = times_power_of_two(values, wide)
    inexact = times_power_of_two(found, -wide) != values
    return torch.where(inexact, found.nextafter(torch.full_like(found, -math.inf)), found)
