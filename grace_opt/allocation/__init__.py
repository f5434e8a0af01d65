"""Divide a budget: one level for each group, such as the bits of each channel, so that the losses sum to the least.

A multiple-choice knapsack: `allocate` solves it by Lagrangian multipliers over lower convex hulls, with a certified
lower bound, or exactly. When: bits, ranks or kept tokens are to be chosen for many groups from tables of losses and
costs. Sources: Everett, Operations Research 11 (1963); Sinha & Zoltners, Operations Research 27 (1979).
"""

from .allocation import Allocation
from .call import allocate
from .frontier import Frontier

__all__ = ["Allocation", "Frontier", "allocate"]
