"""Costs and a budget as one row of integers: sums of floats are compared without any rounding but the last.

A choice keeps a budget if the sum of its costs, rounded once, is at most the budget: ``math.fsum(costs) <= budget``,
as `grace_opt.allocate` has it. All costs are multiples of one power of two; in that unit they are integers, and so is
the largest sum that is rounded to the budget or below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from .rows import Row


def cost_row(words: str, costs: Sequence[float], budget: float) -> Row:
    """The row of a budget.

    Parameters
    ----------
    words : str
    costs : sequence of float
        One per vertex, finite and at least 0.
    budget : float
        At least 0; infinite: none.

    Examples
    --------
    >>> row = cost_row("budget", [0.1, 0.2, 0.3], 0.3)
    >>> row.holds({2}), row.holds({0, 1}), 0.1 + 0.2 <= 0.3
    (True, False, False)
    """
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = max((below for _, below in ratios), default=1)
    counts = tuple(above * (unit // below) for above, below in ratios)
    # A common factor, of costs such as 1000, 2000: small numbers are quicker.
    common = math.gcd(*counts) or 1
    limit = None if math.isinf(budget) else _largest(budget, Fraction(common, unit))
    paid = [(vertex, count // common) for vertex, count in enumerate(counts) if count]
    return Row(words, tuple(vertex for vertex, _ in paid), tuple(count for _, count in paid), None, limit)


def _largest(budget: float, unit: Fraction) -> int:
    """How many units are at most the budget when their sum is rounded to float64."""
    above = math.nextafter(budget, math.inf)
    if math.isinf(above):
        return Fraction(budget) // unit
    count = int((Fraction(budget) + Fraction(above)) / 2 // unit)
    return count if float(count * unit) <= budget else count - 1
