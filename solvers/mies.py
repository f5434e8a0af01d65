r"""MIES, minimum incremental error selection: the greedy of GRACE, Algorithm 1, batched over instances.

Maths: scores start at the diagonal; take the smallest, :math:`j^*`; add :math:`2 W_{:,j^*}` to every remaining score;
repeat k times. A score always is the increase of f if its vertex joins. Complexity O(k n) per instance, k steps of a
few tensor operations for the whole batch. Guarantee: none (W = vvᵀ with v = (.9, 1, -1) and k = 2 gives .01 where 0 is
optimal), except for diagonal W. Good on attention's W, where it is optimal in most cases. Reference: GRACE (arXiv
2604.16983), Algorithm 1.
"""

from __future__ import annotations

import torch

from grace_opt.kernels.greedy import greedy_order
from grace_opt.objective import mask_from_indices
from grace_opt.problem import Problem
from grace_opt.registry import NoOptions, Run, register
from grace_opt.solution import Result


@register("mies", batched=True, guarantee="optimal for diagonal W")
def mies(problem: Problem, options: NoOptions, run: Run) -> Result:
    """Greedily add the vertex that increases f least; ties go to the lowest index."""
    scores = problem.diagonal.masked_fill(~problem.candidates, torch.inf)
    order = greedy_order(problem.W, scores, problem.k, problem.k_max)
    return Result(mask_from_indices(order, problem.n))
