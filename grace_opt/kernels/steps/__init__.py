"""Steps of `allocate`: along the lower convex hulls of all groups, and those that a single budget holds.

In torch, or compiled for the CPU: one pass where torch takes one per operation. Both give the same numbers, bit for
bit.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._shared.operation import Compiled, Operation, trial_of
from .._shared.threads import COMPILE_FROM, worth_compiling
from . import reference

OPERATION = Operation(
    "steps",
    "steps and moves of allocate",
    cpu=Compiled(f"once a process has had {COMPILE_FROM:,} levels of groups", trial_of(__name__, "cpu")),
)


class Hulls(NamedTuple):
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


def lower_hulls(losses: Tensor, costs: Tensor, admissible: Tensor) -> Hulls:
    """Return the steps of the lower convex hull of every group; all arguments are ``(B, n, L)``.

    Collinear levels are kept, for finer steps; of equal levels, the first. Complexity: O(L²) per group.
    """
    if losses.device.type == "cpu" and worth_compiling(losses.numel()):
        from .cpu import lower_hulls as compiled

        return Hulls(*compiled(losses, costs, admissible))
    return Hulls(*reference.lower_hulls(losses, costs, admissible))


def within_budget(
    losses: Tensor, costs: Tensor, admissible: Tensor, limits: Tensor, hulls: Hulls
) -> tuple[Tensor, Tensor]:
    """Take the steepest steps that one budget holds, then make single moves until none improves and fits.

    Parameters
    ----------
    losses, costs, admissible : Tensor (B, n, L)
        No sum of costs is rounded: they are whole multiples of some number.
    limits : Tensor (B,)
    hulls : Hulls

    Returns
    -------
    levels : Tensor (B, n), int64
    price : Tensor (B,)
        Slope of the first step that does not fit, 0 if all fit; halfway to the last one that does if that leaves
        nothing to spend.
    """
    if losses.device.type == "cpu" and worth_compiling(losses.numel()):
        from .cpu import within_budget as compiled

        return compiled(losses, costs, admissible, limits, hulls.levels, hulls.cost, hulls.slope)
    return reference.within_budget(losses, costs, admissible, limits, hulls.levels, hulls.cost, hulls.slope)
