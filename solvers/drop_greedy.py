r"""Drop-greedy: from all candidates downwards, drop the vertex whose removal lowers f most, until k are left.

Maths: removing i from S changes f by :math:`W_{ii} - 2 (W 1_S)_i`; the smallest is taken, then :math:`2 W_{:,i}` is
added to the others' changes: the loop of MIES with other scores at its start. Ties: the lowest index is dropped.
Complexity O(n²) per instance for the sums and O((n - k) n) for the drops. Guarantee: optimal for diagonal W, else none.
Good where every vertex interacts with all others alike, as in maximum diversity (W = -d): its first decisions look at
all vertices, those of MIES at nearly none. Bad where a few vertices are far heavier than the rest and cancel each
other, as the massive channels of attention's W do: while all of them are in, dropping one would raise f, and some stay
to the end. Reference: the destructive heuristics of Glover, Kuo & Dhir, Heuristic algorithms for the maximum diversity
problem (1998); Asahiro et al., Greedily finding a dense subgraph (2000).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grace_opt.errors import OptionError
from grace_opt.kernels.greedy import cost_path, greedy_order, removal_scores
from grace_opt.objective import mask_from_indices
from grace_opt.problem import Problem
from grace_opt.registry import Run, register
from grace_opt.solution import Result


@dataclass(frozen=True)
class DropGreedyOptions:
    """Options of `drop_greedy`.

    Attributes
    ----------
    path : bool
        Go on to the empty set, O(n²), and report in ``stats`` the ``order`` (..., n), the vertices from the last one
        dropped to the first (int64, padded with -1), so that its first j are the set of size j; and the ``path``
        (..., n + 1): f of that set for every j, summed in float64, infinite where there are fewer than j candidates.
    """

    path: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, bool):
            raise OptionError(f"path={self.path!r}: give True or False.")


@register("drop_greedy", options=DropGreedyOptions, batched=True, guarantee="optimal for diagonal W")
def drop_greedy(problem: Problem, options: DropGreedyOptions, run: Run) -> Result:
    """Drop the vertex whose removal lowers f most until k are left; of equal ones, the lowest index goes."""
    size = problem.candidates.sum(-1)
    scores = removal_scores(problem.W, problem.candidates)
    drops = size if options.path else size - problem.k
    dropped = greedy_order(problem.W, scores, problem.candidates, drops, int(drops.max()))
    if not options.path:
        return Result(problem.candidates & ~dropped.mask)
    order = _reversed(dropped.order, size, problem.n)
    step = torch.arange(problem.n, device=order.device)
    mask = mask_from_indices(torch.where(step < problem.k.unsqueeze(-1), order, -1), problem.n)
    return Result(mask, stats={"order": order, "path": cost_path(problem.W, order)})


def _reversed(dropped: Tensor, size: Tensor, n: int) -> Tensor:
    """Each row's first `size` entries back to front, padded with -1 to width n."""
    if dropped.shape[-1] == 0:
        return dropped.new_full((dropped.shape[0], n), -1)
    place = size.unsqueeze(-1) - 1 - torch.arange(n, device=dropped.device)
    return torch.where(place < 0, -1, dropped.gather(-1, place.clamp_min(0)))
