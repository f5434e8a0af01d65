r"""MIES, minimum incremental error selection: the greedy of GRACE, Algorithm 1, batched over instances.

Maths: scores start at the diagonal; take the smallest, :math:`j^*`; add :math:`2 W_{:,j^*}` to every remaining score;
repeat k times. A score always is the increase of f if its vertex joins. Complexity O(k n) per instance, k steps of a
few tensor operations for the whole batch. Guarantee: none (W = vvᵀ with v = (.9, 1, -1) and k = 2 gives .01 where 0 is
optimal), except for diagonal W. Good on attention's W, where it is optimal in most cases. The sets for k = 0, 1, 2, …
are nested, so one pass to n gives f for every k: ``path=True``. Reference: GRACE (arXiv 2604.16983), Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grace_opt.errors import OptionError
from grace_opt.kernels.greedy import cost_path, greedy_order
from grace_opt.objective import mask_from_indices
from grace_opt.problem import Problem
from grace_opt.registry import register
from grace_opt.run import Run
from grace_opt.solution import Result


@dataclass(frozen=True)
class MiesOptions:
    """Options of `mies`.

    Attributes
    ----------
    path : bool
        Go on to the last candidate, O(n²), and report in ``stats`` the ``order`` (..., n) in which vertices were taken
        (int64, padded with -1) and the ``path`` (..., n + 1): f of the greedy set for every k, summed in float64,
        infinite where there are fewer than k candidates.
    """

    path: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, bool):
            raise OptionError(f"path={self.path!r}: give True or False.")


@register("mies", options=MiesOptions, batched=True, guarantee="optimal for diagonal W")
def mies(problem: Problem, options: MiesOptions, run: Run) -> Result:
    """Greedily add the vertex that increases f least; ties go to the lowest index."""
    if not options.path:
        taken = greedy_order(problem.W, None, problem.candidates, problem.k, problem.k_max)
        return Result(taken.mask, objective=taken.rise)
    order = greedy_order(problem.W, None, problem.candidates, problem.candidates.sum(-1), problem.n).order
    step = torch.arange(problem.n, device=order.device)
    mask = mask_from_indices(torch.where(step < problem.k.unsqueeze(-1), order, -1), problem.n)
    return Result(mask, stats={"order": order, "path": cost_path(problem.W, order)})
