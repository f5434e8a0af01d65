"""Random: a uniformly random k-subset of the candidates, the baseline that every method should beat.

Maths: the seed gives each vertex a priority; the k smallest are taken. The instances of a batch share the priorities
(common random numbers): a batch equals a loop, and noise does not hide the differences between instances.
Draw several sets of one instance with several seeds. Complexity O(n log n). Guarantee: none. Reference: none needed.
"""

from __future__ import annotations

import numpy as np
import torch

from grace_opt.problem import Problem
from grace_opt.registry import NoOptions, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult


@register_solver("random", batched=True, guarantee="none", forms=("sparse", "factored"))
def random(problem: Problem, options: NoOptions, run: Run) -> SolverResult:
    """Take a uniformly random set of k candidates."""
    priority = torch.from_numpy(np.random.default_rng(run.seed).permutation(problem.n)).to(problem.k.device)
    priority = torch.where(problem.candidates, priority, torch.full_like(priority, problem.n))
    rank = priority.argsort(dim=-1, stable=True).argsort(dim=-1)
    return SolverResult(rank < problem.k.unsqueeze(-1))
