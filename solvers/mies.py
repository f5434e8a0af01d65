r"""MIES, minimum incremental error selection: the greedy method of GRACE, Algorithm 1, batched over instances.

Maths: scores start at the diagonal; take the smallest, :math:`j^*`; add :math:`2 W_{:,j^*}` to every remaining score;
repeat k times. A vertex's score is always the increase of f if it joins. Complexity O(k n) per instance, k steps of a
few tensor operations for the whole batch; O((n + edges) log n) for sparse W, O(k n d) for W in factors with d rows.
Under a time limit, vertices of W in factors go in blocks if there is no time for one after the other; of both, those of
the least scores complete the set at the end. Guarantee: optimal for diagonal W, else none (W = vvᵀ with
v = (.9, 1, -1) and k = 2 gives .01; the optimum is 0). Good on attention's W, where it is usually optimal. The sets for
k = 0, 1, 2, … are nested, so one pass to n gives f for every k: ``path=True``. Reference: GRACE (arXiv 2604.16983),
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from grace_opt.kernels.solve.columns.reference import greedy
from grace_opt.kernels.solve.greedy import Greedy, greedy_order
from grace_opt.kernels.solve.sparse import greedy as sparse_greedy
from grace_opt.objective import mask_from_indices
from grace_opt.problem import FactoredWeights, Problem, SparseWeights, Weights
from grace_opt.registry import check_fields, flag, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult


@dataclass(frozen=True)
class MiesOptions:
    """Options of `mies`.

    Attributes
    ----------
    path : bool
        Continue to the last candidate, O(n²). ``stats["order"]`` (..., n) then lists the vertices as they were taken
        (int64, padded with -1), and ``stats["path"]`` (..., n + 1) is f of the greedy set for every k, summed in
        float64; infinite if there are fewer than k candidates.
    """

    path: bool = False

    def __post_init__(self) -> None:
        check_fields(self, flag, "path")


@register_solver(
    "mies", options=MiesOptions, batched=True, guarantee="optimal for diagonal W", forms=("sparse", "factored")
)
def mies(problem: Problem, options: MiesOptions, run: Run) -> SolverResult:
    """Add the vertex that increases f least, k times; ties go to the lowest index."""
    count, width = (problem.candidates.sum(-1), problem.n) if options.path else (problem.k, problem.k_max)
    taken, cut = _taken(problem.weights, problem.candidates, count, width, run)
    if not options.path:
        return SolverResult(taken.mask, limit=cut, objective=None if cut is not None and cut.any() else taken.rise)
    step = torch.arange(problem.n, device=count.device)
    mask = mask_from_indices(torch.where(step < problem.k.unsqueeze(-1), taken.order, -1), problem.n)
    stats = {"order": taken.order, "path": problem.weights.path(taken.order)}
    return SolverResult(mask, limit=cut, stats=stats, objective_stats=("path",))


Taken = tuple[Greedy, Tensor | None]


@singledispatch
def _taken(W: Weights, candidates: Tensor, k: Tensor, k_max: int, run: Run) -> Taken:
    """The first k vertices, in an order of this width, and which instances were cut short."""
    return greedy_order(W.tensor, None, candidates, k, k_max), None


@_taken.register
def _by_edges(W: SparseWeights, candidates: Tensor, k: Tensor, k_max: int, run: Run) -> Taken:
    """The same choices from the edges alone, by a heap; when time is up, the least scores complete the set at once."""
    order, rise, cut = sparse_greedy.added(W.graph(), candidates, int(k), run.expired)
    order = torch.nn.functional.pad(order, (0, k_max - order.shape[-1]), value=-1)
    known = torch.tensor([rise], dtype=torch.float64, device="cpu")
    return Greedy(order, mask_from_indices(order, W.n), known), torch.full_like(k, cut, dtype=torch.bool)


@_taken.register
def _by_columns(W: FactoredWeights, candidates: Tensor, k: Tensor, k_max: int, run: Run) -> Taken:
    """The same on columns computed one after the other, in blocks if time is short."""
    return greedy.greedy_order(W, W.diagonal().masked_fill(~candidates, torch.inf), k, k_max, run.left)
