"""Constraints beside the size: groups, pairs, budgets, as linear rows over the vertices, and whether they can hold.

When: ``solve(groups=…, exclude=…, together=…, costs=…)``. `arguments` makes rows of what users write, `rows` tells
whether a choice keeps them, and `feasible` finds a choice that does, or says which of them contradict each other.
"""

from .arguments import NAMES, constraints_of
from .feasible import find_choice, refuse_infeasible
from .program import UndecidedError
from .rows import Constraints, IntegerRows, Row

__all__ = [
    "NAMES",
    "Constraints",
    "IntegerRows",
    "Row",
    "UndecidedError",
    "constraints_of",
    "find_choice",
    "refuse_infeasible",
]
