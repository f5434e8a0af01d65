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

import torch

from grace_opt.kernels.solve.columns.reference import greedy
from grace_opt.kernels.solve.columns.source import ColumnWeights
from grace_opt.kernels.solve.greedy import cost_path, first_scores, greedy_order
from grace_opt.kernels.solve.sparse import greedy as sparse_greedy
from grace_opt.objective import mask_from_indices
from grace_opt.problem import Problem, SparseWeights
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
    if isinstance(problem.weights, SparseWeights):
        return _sparse(problem, problem.weights, options, run)
    if isinstance(problem.W, ColumnWeights):
        return _by_columns(problem, problem.W, options, run)
    if not options.path:
        taken = greedy_order(problem.W, None, problem.candidates, problem.k, problem.k_max)
        return SolverResult(taken.mask, objective=taken.rise)
    order = greedy_order(problem.W, None, problem.candidates, problem.candidates.sum(-1), problem.n).order
    step = torch.arange(problem.n, device=order.device)
    mask = mask_from_indices(torch.where(step < problem.k.unsqueeze(-1), order, -1), problem.n)
    return SolverResult(mask, stats={"order": order, "path": cost_path(problem.W, order)}, objective_stats=("path",))


def _sparse(problem: Problem, W: SparseWeights, options: MiesOptions, run: Run) -> SolverResult:
    """The same choices from the edges alone, by a heap; when time is up, the least scores complete the set at once."""
    graph, n, k = W.graph(), problem.n, problem.k_max
    count = int(problem.candidates.sum()) if options.path else k
    order, rise, cut = sparse_greedy.added(graph, problem.candidates, count, run.expired)
    limit = torch.full_like(problem.k, cut, dtype=torch.bool)
    mask = mask_from_indices(order[:, :k], n)
    if not options.path:
        known = None if cut else torch.tensor([rise], dtype=torch.float64, device="cpu")
        return SolverResult(mask, limit=limit, objective=known)
    stats = {
        "order": torch.nn.functional.pad(order, (0, n - count), value=-1),
        "path": sparse_greedy.path_of(graph, order),
    }
    return SolverResult(mask, limit=limit, stats=stats, objective_stats=("path",))


def _by_columns(problem: Problem, W: ColumnWeights, options: MiesOptions, run: Run) -> SolverResult:
    """The same on columns computed one after the other, in blocks if time is short."""
    scores = first_scores(problem.W, problem.candidates)
    count, width = (problem.candidates.sum(-1), problem.n) if options.path else (problem.k, problem.k_max)
    taken, cut = greedy.greedy_order(W, scores, count, width, run.left)
    if not options.path:
        return SolverResult(taken.mask, limit=cut, objective=None if cut.any() else taken.rise)
    step = torch.arange(problem.n, device=scores.device)
    mask = mask_from_indices(torch.where(step < problem.k.unsqueeze(-1), taken.order, -1), problem.n)
    stats = {"order": taken.order, "path": greedy.cost_path(W, taken.order)}
    return SolverResult(mask, limit=cut, stats=stats, objective_stats=("path",))
