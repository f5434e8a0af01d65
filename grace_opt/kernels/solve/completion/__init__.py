"""Complete many partial sets greedily at once: the lookahead of beam search, in torch or compiled for the CPU.

Both make the same choices and sums, bit for bit, for the reasons given in `greedy`. Source: the pilot method of Duin &
Voss (1999), with GRACE's Algorithm 1 as the pilot.
"""

from __future__ import annotations

from torch import Tensor

from ..._shared.operation import Compiled, Operation, trial_of
from ..._shared.threads import COMPILE_FROM, enough_steps
from . import reference

OPERATION = Operation(
    "completion",
    "greedy completions of partial sets, for beam's lookahead",
    cpu=Compiled(f"from {COMPILE_FROM:,} steps on", trial_of(__name__, "cpu")),
)


def completions(W: Tensor, owner: Tensor, scores: Tensor, need: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Complete partial sets by MIES.

    Parameters
    ----------
    W : Tensor (B, n, n), float32 or float64
    owner : Tensor (R,), int64
        The instance that each partial set belongs to.
    scores : Tensor (R, n), of W's dtype or wider
        Increase of f when a vertex joins; infinite for vertices that must not.
    need : Tensor (R,), int64
        Number of missing vertices, at most `width`.
    width : int
        Width of the order.

    Returns
    -------
    order : Tensor (R, width), int64
        The added vertices, in order, padded with -1.
    cost : Tensor (R,), float64
        Increase of f; infinite if there were too few vertices.

    Notes
    -----
    O(need · n) per partial set; W is never copied per set.
    """
    if W.device.type == "cpu" and enough_steps(scores.numel() * width):
        from .cpu import completions as compiled

        return compiled(W, owner, scores, need, width)
    return reference.completions(W, owner, scores, need, width)
