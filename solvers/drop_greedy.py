r"""Drop-greedy: start from all candidates and drop the vertex whose removal lowers f most, until k are left.

Maths: removing i from S changes f by :math:`W_{ii} - 2 (W 1_S)_i`; the smallest change is taken, then :math:`2 W_{:,i}`
is added to the others: the loop of MIES with other starting scores. Ties: the lowest index is dropped. Complexity O(n²)
per instance for the sums and O((n - k) n) for the drops. Guarantee: optimal for diagonal W, else none. Good where every
vertex interacts with all others in much the same way, as in maximum diversity (W = -d): its first decisions use all
vertices, those of MIES almost none. Bad where a few vertices are far heavier than the rest and cancel each other, as
the massive channels of attention's W do: while all of them are in, dropping one would raise f, and some stay to the
end. If a score has become mere rounding error, because what was dropped dwarfs what is left, all scores are summed
again, O(n²). Sparse W: O((n + edges) log n). W in factors with d rows: O((n - k) n d), without that care. Under a time
limit, W in factors loses blocks of vertices if there is no time for one after the other, and both the least scores at
the end.
Reference: the destructive heuristics of Glover, Kuo & Dhir, Heuristic algorithms for the maximum diversity problem
(1998); Asahiro et al., Greedily finding a dense subgraph (2000).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grace_opt.kernels.solve.columns.reference import greedy
from grace_opt.kernels.solve.greedy import greedy_order, removal_scores
from grace_opt.kernels.solve.sparse import greedy as sparse_greedy
from grace_opt.objective import mask_from_indices
from grace_opt.problem import FactoredWeights, Problem, SparseWeights, Weights
from grace_opt.registry import check_fields, flag, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult

#: If a sum has shrunk by this factor, only a few digits of it are right.
DWARFING_RATIO = 2.0**36
#: Number of rows of W to process at a time.
ROWS_AT_A_TIME = 64
#: Approximate seconds per stored entry of sparse W of the careful sums before the first drop.
SECONDS_TO_SUM = 2.5e-8


@dataclass(frozen=True)
class DropGreedyOptions:
    """Options of `drop_greedy`.

    Attributes
    ----------
    path : bool
        Continue to the empty set, O(n²). ``stats["order"]`` (..., n) then lists the vertices from the last one dropped
        to the first (int64, padded with -1): its first j are the set of size j. ``stats["path"]`` (..., n + 1) is f of
        that set for every j, summed in float64; infinite if there are fewer than j candidates.
    """

    path: bool = False

    def __post_init__(self) -> None:
        check_fields(self, flag, "path")


@register_solver(
    "drop_greedy",
    options=DropGreedyOptions,
    batched=True,
    guarantee="optimal for diagonal W",
    forms=("sparse", "factored"),
)
def drop_greedy(problem: Problem, options: DropGreedyOptions, run: Run) -> SolverResult:
    """Drop the vertex whose removal lowers f most until k are left; ties drop the lowest index."""
    size = problem.candidates.sum(-1)
    drops = size if options.path else size - problem.k
    dropped, left, cut = _dropped(problem.weights, problem.candidates, drops, options.path, run)
    if not options.path:
        return SolverResult(left, limit=cut)
    order = _reversed(dropped, size, problem.n)
    step = torch.arange(problem.n, device=order.device)
    mask = mask_from_indices(torch.where(step < problem.k.unsqueeze(-1), order, -1), problem.n)
    stats = {"order": order, "path": problem.weights.path(order)}
    return SolverResult(mask, limit=cut, stats=stats, objective_stats=("path",))


Dropped = tuple[Tensor, Tensor, Tensor | None]


@singledispatch
def _dropped(W: Weights, candidates: Tensor, drops: Tensor, path: bool, run: Run) -> Dropped:
    """The dropped vertices in order, padded with -1; the mask of those left; and which instances were cut short."""
    scores = removal_scores(W.tensor, candidates)
    order, mask, _ = greedy_order(W.tensor, scores, candidates, drops, int(drops.max()))
    left = candidates & ~mask
    for b in _suspects(W, candidates).nonzero().flatten().tolist():
        count, weights = int(drops[b]), W.tensor[b].to("cpu", torch.float64).numpy()
        free = candidates[b].cpu().numpy().copy()
        order[b, :count] = torch.tensor(_carefully(weights, free, count), dtype=torch.int64, device=order.device)
        left[b] = torch.from_numpy(free)
    return order, left, None


@_dropped.register
def _by_edges(W: SparseWeights, candidates: Tensor, drops: Tensor, path: bool, run: Run) -> Dropped:
    """The same drops from the edges alone, by a heap; when time is up, the least scores are dropped at once.

    Scores that are rounding error are summed again.
    """
    count = int(drops)
    if path or run.has_time(SECONDS_TO_SUM * W.numel()):
        dropped, cut = sparse_greedy.dropped(W.graph(), candidates, count, run.expired)
    else:
        scores = W.diagonal() - 2 * W.times(candidates)
        dropped, cut = sparse_greedy.dropped_at_once(scores, candidates, count), count > 0
    return dropped, candidates & ~mask_from_indices(dropped, W.n), torch.full_like(drops, cut, dtype=torch.bool)


@_dropped.register
def _by_columns(W: FactoredWeights, candidates: Tensor, drops: Tensor, path: bool, run: Run) -> Dropped:
    """The same on columns computed one after the other, in blocks if time is short."""
    scores = (W.diagonal() - 2 * W.times(candidates)).masked_fill(~candidates, torch.inf)
    dropped, cut = greedy.greedy_order(W, scores, drops, int(drops.max()), run.left)
    return dropped.order, candidates & ~dropped.mask, cut


def _suspects(weights: Weights, candidates: Tensor) -> Tensor:
    """Instances in which some weights may dwarf the sum of others; a quick test that rules out almost all."""
    W, least = weights.tensor, weights.diagonal().abs().masked_fill(~candidates, torch.inf).amin(-1).double()
    spread = weights.n * weights.largest()
    if (spread > DWARFING_RATIO * least).any():
        # The diagonal may be 0: use the least weight that is not 0, some rows at a time.
        sizes = (W[:, at : at + ROWS_AT_A_TIME].abs() for at in range(0, W.shape[-1], ROWS_AT_A_TIME))
        parts = [size.masked_fill_(size == 0, torch.inf).amin((-1, -2)) for size in sizes]
        least = least.maximum(torch.stack(parts).amin(0))
    return spread > DWARFING_RATIO * least


def _carefully(W: npt.NDArray[np.float64], left: npt.NDArray[np.bool_], count: int) -> list[int]:
    """The same drops one at a time, from `left`; scores are summed again once they have become rounding error."""
    sizes = np.abs(W)
    grain = sizes.min(where=sizes > 0, initial=np.inf)
    order: list[int] = []
    held = np.zeros(len(W))  # what the scores were summed from; nothing yet
    rest = np.full(len(W), np.inf)
    scores = np.full(len(W), np.inf)
    for step in range(count):
        if step == 0 or (held[left] / DWARFING_RATIO > np.maximum(rest[left], grain)).any():
            scores = np.where(left, W.diagonal() - 2 * W[left].sum(0), np.inf)
            held = rest = sizes[left].sum(0)
        worst = int(scores.argmin())
        order.append(worst)
        left[worst] = False
        scores = scores + 2 * W[worst]
        scores[worst] = np.inf
        rest = rest - sizes[worst]
    return order


def _reversed(dropped: Tensor, size: Tensor, n: int) -> Tensor:
    """Each row's first `size` entries back to front, padded with -1 to width n."""
    if dropped.shape[-1] == 0:
        return dropped.new_full((dropped.shape[0], n), -1)
    place = size.unsqueeze(-1) - 1 - torch.arange(n, device=dropped.device)
    return torch.where(place < 0, -1, dropped.gather(-1, place.clamp_min(0)))
