r"""THINK: the k smallest diagonal entries of W, without regard to interactions.

Maths: minimises :math:`\sum_{i \in S} W_{ii}`. Complexity O(n log n). Guarantee: optimal for diagonal W. Good as a
baseline and where interactions are weak. Reference: ThinK (arXiv 2407.21018); on attention's W its score
``mean(q²) mean(k²)`` orders channels as diag(W) does.
"""

from __future__ import annotations

import torch

from grace_opt.objective import mask_from_indices
from grace_opt.problem import Problem
from grace_opt.registry import NoOptions, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult


@register_solver("think", batched=True, guarantee="optimal for diagonal W", forms=("sparse", "factored"))
def think(problem: Problem, options: NoOptions, run: Run) -> SolverResult:
    """Take the k vertices with the smallest diagonal entries; ties go to the lowest index."""
    scores = problem.diagonal.masked_fill(~problem.candidates, torch.inf)
    order = scores.argsort(dim=-1, stable=True)[:, : problem.k_max]
    kept = torch.arange(problem.k_max, device=order.device) < problem.k.unsqueeze(-1)
    return SolverResult(mask_from_indices(torch.where(kept, order, -1), problem.n))
