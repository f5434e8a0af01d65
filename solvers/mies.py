r"""MIES, minimum-increment edge selection: the greedy of GRACE, Algorithm 1, batched over instances.

Maths: scores start at the diagonal; take the smallest, :math:`j^*`; add :math:`2 W_{:,j^*}` to every remaining score;
repeat k times. A score always is the increase of f if its vertex joins. Complexity O(k n) per instance, k steps of a
few tensor operations for the whole batch. Guarantee: none (W = vvᵀ with v = (.9, 1, -1) and k = 2 gives .01 where 0 is
optimal), except for diagonal W. Good on attention's W, where it is optimal in most cases. Reference: GRACE (arXiv
2604.16983), Algorithm 1.
"""

from __future__ import annotations

import torch

from grace_opt.objective import mask_from_indices
from grace_opt.problem import Problem
from grace_opt.registry import NoOptions, Run, register
from grace_opt.solution import Result


@register("mies", batched=True, guarantee="optimal for diagonal W")
def mies(problem: Problem, options: NoOptions, run: Run) -> Result:
    """Greedily add the vertex that increases f least; ties go to the lowest index."""
    W, n = problem.W, problem.n
    rows = W.reshape(-1, n)
    first_row = torch.arange(0, rows.shape[0], n, device=W.device)
    scores = problem.diagonal.masked_fill(~problem.candidates, torch.inf)
    order = torch.empty(scores.shape[0], problem.k_max, dtype=torch.int64, device=W.device)
    for step in range(problem.k_max):
        best = scores.argmin(-1)  # torch returns the first minimum: the lowest index
        scores.add_(rows.index_select(0, first_row + best), alpha=2)
        scores.scatter_(-1, best.unsqueeze(-1), torch.inf)
        order[:, step] = best
    # Greedy sets are nested: an instance with a smaller k keeps its first picks.
    kept = torch.arange(problem.k_max, device=W.device) < problem.k.unsqueeze(-1)
    return Result(mask_from_indices(torch.where(kept, order, -1), n))
