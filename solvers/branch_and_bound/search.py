r"""Branch and bound: proves the optimum, or stops at a limit with the best choice and a valid bound.

Maths, in order: (1) an incumbent by tabu search; (2) probing with the dual of the continuous relaxation fixes most
vertices of attention's W; (3) a diagonal shift by coordinate ascent (QCR-CD) makes the relaxation tighter, or convex in
the first place; probing again; (4) compiled depth-first search with that relaxation at every node, for a limited number
of nodes; (5) if that does not finish, multipliers of products of pairs (DNN + RLT, by ADMM) tighten the relaxation, and
depth-first search is tried again; (6) if that does not finish either, branch on the vertex that the relaxation is least
sure of, and take both halves back to (5), the one with the lowest bound first. Under constraints, all of it with node
weights that pay for them (`grace_opt.bounds.lagrangian`), an incumbent by local_search, and a depth-first search that
closes what cannot keep them.

Complexity exponential at worst; O(n³) per relaxation, O(n²) per node. Guarantee: optimal, to 1e-9 of \|f\| (if f nearly
cancels: to the rounding of the chosen weights), or to the last unit for whole numbers; every bound holds under
rounding. If weights are so far apart, or cancel so well, that rounding hides the optimum from the relaxations, all
choices are tried if they are few; otherwise nothing is claimed. Good on attention's W up to several hundred vertices,
on random graphs up to about 100. References: Billionnet & Elloumi (2007); Krislock, Malick & Roupin, Comput. Oper. Res.
66 (2016), for the strength of such bounds on k-cluster.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from grace_opt import bounds, registry
from grace_opt._util.arrays import count_true
from grace_opt.bounds import fixing
from grace_opt.bounds.dnn import SECONDS_PER_DNN_STEP, DnnMultipliers, dnn_relaxation
from grace_opt.bounds.lagrangian import priced
from grace_opt.bounds.qcr import (
    LARGEST_RELAXED,
    QuadraticRelaxation,
    qcr_relaxation,
    seconds_to_relax,
    solve_relaxation,
)
from grace_opt.bounds.subproblem import Subproblem, sums_are_exact
from grace_opt.errors import OptionError, SolverError
from grace_opt.parallel import map_in_threads
from grace_opt.problem import Problem
from grace_opt.registry import check_fields, choice, integer, register_solver
from grace_opt.run import Run
from grace_opt.solution import OPTIMALITY_RTOL, STEP_MARGIN, SolverResult, rounding
from grace_opt.solvers.branch_and_bound.depth_first import ConstrainedDepthFirst, DepthFirst
from grace_opt.starts import starting_masks

#: Number of nodes of a depth-first search before pairs, with pairs, and with ``bound="sdp"``, which branches on the
#: strong bound.
SHIFT_NODES, PAIR_NODES, STRONG_NODES = 2_000, 20_000, 200
#: Seconds of depth-first search between two looks at the clock, roughly.
SECONDS_BETWEEN_CLOCK_CHECKS = 0.05
#: If rounding prevents a proof and there are no more subsets than this, all are tried.
MAX_ENUMERATED_SUBSETS = 20_000_000
#: Size of the first slice, before the time per node is known: this many entries of W.
FIRST_SLICE_ENTRIES = 1_000_000
#: Rounds of strengthening and probing at one node, while they fix many.
MAX_ROUNDS_AT_A_NODE = 4
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class BranchAndBoundOptions:
    """Options of `branch_and_bound`.

    Attributes
    ----------
    bound : {"auto", "qp", "sdp"}
        Bound at the nodes. ``"qp"``: the convex quadratic relaxation alone; ``"sdp"``: the one with products of pairs
        at every branching; ``"auto"``: the second if the first does not finish.
    start : str, bool mask (..., n), or int indices (..., k)
        The first incumbent: a method's name, or a choice of k vertices as a mask or by number (for a graph, positions
        in ``list(graph.nodes)``). A bad one makes everything slower.
    node_limit : int or None
        Stop an instance after this many nodes.
    """

    bound: str = "auto"
    start: Any = "tabu"
    node_limit: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, choice, "bound", allowed=("auto", "qp", "sdp"))
        check_fields(self, integer, "node_limit", at_least=1, optional=True)
        if isinstance(self.start, str) and self.start in ("branch_and_bound", "portfolio"):
            raise OptionError(f"start={self.start!r} would start from itself: name another method, a mask or indices.")


@register_solver(
    "branch_and_bound",
    options=BranchAndBoundOptions,
    exact=True,
    batched=True,
    guarantee="optimal",
    compiled=True,
    searches=True,
    constraints=True,
)
def branch_and_bound(problem: Problem, options: BranchAndBoundOptions, run: Run) -> SolverResult:
    """Prove the optimum by relaxations, fixing and search, or stop at a limit with a valid bound."""
    if problem.n > LARGEST_RELAXED:
        raise SolverError(
            f"branch_and_bound: n = {problem.n} is beyond {LARGEST_RELAXED}: a relaxation would take O(n³) time and "
            f"{8 * 12 * problem.n**2 / 2**30:.1f} GiB. Use method='portfolio' or 'tabu'; certify=True adds a bound."
        )
    masks = _incumbents(problem, options.start, run.until(0.25)).cpu().numpy()
    run.ctrl_c_stops()
    rows = bounds.row_bound_in_time(problem, run.beside_search()).tolist()
    steps = problem.step.tolist()  # once: instances know theirs
    trees = [
        _Tree(problem.instance(b), steps[b], masks[b], rows[b], options, run.instance(b)) for b in range(len(masks))
    ]
    map_in_threads(_Tree.grow, trees, run)
    for tree in trees:
        tree.enumerate_if_in_doubt()
    return SolverResult(
        torch.from_numpy(np.stack([tree.mask for tree in trees])).to(problem.W.device),
        torch.tensor([tree.lower_bound for tree in trees], dtype=torch.float64, device="cpu"),
        torch.tensor([tree.cut_short for tree in trees], dtype=torch.bool, device="cpu"),
        {"nodes": sum(tree.nodes for tree in trees), "strong_bounds": sum(tree.strong for tree in trees)},
    )


def _incumbents(problem: Problem, start: Any, run: Run) -> torch.Tensor:
    if not (isinstance(start, str) and start == "tabu"):
        return starting_masks(problem, start, run)
    if problem.constraints is not None:
        return starting_masks(problem, "local_search", run)
    spec = registry.get("tabu")
    # The default without a time limit: tabu search must not use up all the time.
    return spec.solve(problem, spec.make_options({"iterations": max(1000, 20 * problem.n)}), run).mask


@dataclass(order=True)
class _Open:
    """A part of the tree still to search; ordered by lowest bound, then by age."""

    bound: float
    age: int
    sub: Subproblem = field(compare=False)
    pairs: bool = field(compare=False, default=False)
    warm: DnnMultipliers | None = field(compare=False, default=None)


class _Tree:
    """The search of one instance, on W divided by a power of two near its largest entry."""

    def __init__(
        self,
        problem: Problem,
        step: float,
        mask: npt.NDArray[np.bool_],
        bound: float,
        options: BranchAndBoundOptions,
        run: Run,
    ) -> None:
        self.problem, self.options, self.run = problem, options, run
        self.mask, self.nodes, self.strong, self.age, self.late = mask, 0, 0, 0, False
        self.sub, self.scale = Subproblem.of(problem, mask)
        self.value, self.allowed = self._exact(mask)
        self.known_bound = bound / self.scale
        self.rows = None if problem.constraints is None else problem.constraints.integers
        self.multipliers = np.empty(0)
        self.exact = self.rows is None and sums_are_exact(problem)
        self.step = step / self.scale
        self.rounding = 0.0  # of the first relaxation
        self.floor = math.inf  # least cutoff that parts were closed with, and least leaf that rounding leaves in doubt
        self.open: list[_Open] = []
        self.at_work = self.known_bound  # bound of the part that is being searched
        self.enumerated = False

    @property
    def slack(self) -> float:
        """How far a bound may lie below the incumbent and still prove it: almost a step, or half the tolerance.

        If f nearly cancels, the tolerance is the rounding error of the chosen weights, as far as needed.
        """
        if self.step:
            return max(0.0, self.step * (1 - STEP_MARGIN) - 8 * _EPS * abs(self.value))
        return max(0.5 * OPTIMALITY_RTOL * abs(self.value), min(0.5 * self.allowed, 4 * self.rounding))

    @property
    def cutoff(self) -> float:
        return self.value - self.slack

    @property
    def stopped(self) -> bool:
        limit = self.options.node_limit
        return self.late or self.run.expired() or (limit is not None and self.nodes >= limit)

    @property
    def lower_bound(self) -> float:
        if self.enumerated:
            return self.value * self.scale
        least = min([self.at_work, *(part.bound for part in self.open)])
        if least < self.cutoff:
            return least * self.scale
        if self.step and self.floor >= self.cutoff:
            return self.value * self.scale  # nothing lies strictly between the incumbent and the next step below it
        return min(self.cutoff, self.floor) * self.scale

    def grow(self) -> None:
        """Search until nothing is left, or a limit is reached."""
        if self.sub is None or self.sub.decided or self.known_bound >= self.cutoff:
            self.at_work = self.known_bound if self.sub is None or not self.sub.decided else math.inf
            return
        self.run.begin()
        before, sub = math.inf, self.sub
        if self.rows is not None:
            paying = priced(sub, self.rows, self.value, self.run)
            sub, self.multipliers = paying.sub, paying.multipliers
        while not self.open and not self.proved and self.value < before and not self.stopped:
            # Once, and again if parts were closed with too much slack before a better choice was known.
            before, self.floor = self.value, math.inf
            self._grow(sub)

    @property
    def cut_short(self) -> bool:
        """Whether a limit was reached before everything was searched."""
        return bool(self.open) or (not self.proved and self.stopped)

    @property
    def proved(self) -> bool:
        """Whether the search so far proves the incumbent, to twice the slack or the last unit."""
        return self.lower_bound >= (self.value - (0.0 if self.step else 2 * self.slack)) * self.scale

    def _grow(self, sub: Subproblem) -> None:
        sub, bound = fixing.reduce_by_fixing(sub, self.value, self.slack, self.run)
        bound = max(bound, self.known_bound)
        if not self.step and 0 < sub.k < sub.m and self.run.has_time(seconds_to_relax(sub.m)):
            self.rounding = solve_relaxation(sub).rounding
        self._report(bound)
        self._push(_Open(bound, 0, sub, self.options.bound == "sdp"))
        self.at_work = math.inf
        while self.open and not self.stopped:
            part = heapq.heappop(self.open)
            self.at_work = part.bound
            if part.bound < self.cutoff:
                self._search(part)
                self._report(self.lower_bound / self.scale)
            if self.at_work < self.cutoff:  # unfinished: a limit was reached
                self._push(_Open(self.at_work, part.age, part.sub, part.pairs, part.warm))
            self.at_work = math.inf

    def enumerate_if_in_doubt(self) -> None:
        """Try all choices, if they are few, when weights are too far apart for relaxations or nearly cancel.

        Also if the proof holds only to the rounding of the chosen weights: among giants, that may be more than f.
        """
        free, k = int(count_true(self.problem.candidates)), self.problem.k_max
        sure = self.proved and (
            self.step > 0 or self.lower_bound >= (self.value - OPTIMALITY_RTOL * abs(self.value)) * self.scale
        )
        if self.cut_short or sure or math.comb(free, k) > MAX_ENUMERATED_SUBSETS:
            return
        spec = registry.get("exhaustive")
        found = spec.solve(self.problem.flatten(), spec.make_options({}), self.run)
        if not bool(found.limit[0]):  # type: ignore[index]
            self.mask = found.mask[0].cpu().numpy()
            self.value, self.allowed = self._exact(self.mask)
            self.enumerated = True

    def _push(self, part: _Open) -> None:
        """Keep a part, unless it is closed or decided."""
        if part.bound >= self.cutoff or not 0 <= part.sub.k <= part.sub.m:
            return
        if part.sub.decided:
            self._offer(part.sub, np.full(part.sub.m, part.sub.k > 0))
            return
        heapq.heappush(self.open, part)

    def _search(self, part: _Open) -> None:
        """Bound, fix, search depth first; leave `at_work` at infinity if that settles the part (branching included)."""
        sub, warm, bound = part.sub, part.warm, part.bound
        if not self.run.has_time(self._seconds(sub, part.pairs)):
            self.late = True  # the next step would take too long: end the search
            return
        for _ in range(MAX_ROUNDS_AT_A_NODE):
            relaxation, warm = self._relaxed(sub, part.pairs, warm)
            bound = self.at_work = max(bound, relaxation.bound)
            if bound >= self.cutoff:
                break
            verdict = fixing.probed(sub, relaxation, self.cutoff, self.run)
            if not verdict.any():
                break
            sub, free = sub.fixed(verdict), verdict == 0
            if not 0 < sub.k < sub.m:
                self._push(_Open(bound, part.age, sub))
                self.at_work = math.inf
                return
            relaxation = relaxation.restricted(sub, free)
            warm = None if warm is None else warm.restricted(free)
            few = (~free).sum() < fixing.WORTH_ANOTHER * len(free)
            if few or self.stopped or not self.run.has_time(self._seconds(sub, part.pairs)):
                break
        if bound >= self.cutoff:
            self.at_work = math.inf
            return
        budget = {"auto": PAIR_NODES if part.pairs else SHIFT_NODES, "qp": 2**62, "sdp": STRONG_NODES}
        left, x = self._depth_first(sub, relaxation, budget[self.options.bound])
        if left >= self.cutoff:
            self.at_work = math.inf
        elif self.stopped:
            self.at_work = max(bound, left)
        elif not part.pairs:
            self._push(_Open(bound, part.age, sub, True))
            self.at_work = math.inf
        else:
            self._branch(sub, bound, warm, x)
            self.at_work = math.inf

    def _seconds(self, sub: Subproblem, pairs: bool) -> float:
        """Approximate least number of seconds that `_relaxed` takes."""
        return 2 * seconds_to_relax(sub.m) + SECONDS_PER_DNN_STEP * pairs * float(sub.m**3)

    def _relaxed(
        self, sub: Subproblem, pairs: bool, warm: DnnMultipliers | None
    ) -> tuple[QuadraticRelaxation, DnnMultipliers | None]:
        if not pairs:
            return qcr_relaxation(sub, self.value, run=self.run), None
        self.strong += 1
        return dnn_relaxation(sub, self.value, warm, run=self.run)

    def _depth_first(
        self, sub: Subproblem, relaxation: QuadraticRelaxation, budget: int
    ) -> tuple[float, npt.NDArray[np.float64]]:
        """Search a part for at most `budget` nodes. Returns the least bound left (inf: none), and the root's x."""
        search = (
            DepthFirst(sub, relaxation)
            if self.rows is None
            else ConstrainedDepthFirst(sub, relaxation, self.rows, self.multipliers)
        )
        batch = min(32, max(1, FIRST_SLICE_ENTRIES // sub.m**2))
        while search.top and budget > 0 and not self.stopped:
            seconds, used, found = search.advance(self.value, self.slack, min(batch, budget, self._nodes_left()))
            self.nodes += used
            budget -= used
            if found is not None:
                self._offer(sub, found)
            if self.rows is not None and found is not None:
                continue  # a slice that ends early tells little of the time of a node, and here many may
            batch = max(1, int(min(4.0, SECONDS_BETWEEN_CLOCK_CHECKS / max(seconds, 1e-9)) * batch))
        if not self.exact:
            self.floor = min(self.floor, search.least_leaf())
        return search.least_bound(), relaxation.x

    def _nodes_left(self) -> int:
        limit = self.options.node_limit
        return 2**62 if limit is None else max(1, limit - self.nodes)

    def _branch(self, sub: Subproblem, bound: float, warm: DnnMultipliers | None, x: npt.NDArray[np.float64]) -> None:
        """Two parts: the vertex that the relaxation is least sure of in, and out."""
        share = x if warm is None else np.clip(warm.Y[0].diagonal(), 0.0, 1.0)
        vertex = int(np.argmax(share * (1 - share)))
        for inside in (1, 2):
            verdict = np.zeros(sub.m, np.int8)
            verdict[vertex] = inside
            self.age += 1
            rest = None if warm is None else warm.restricted(verdict == 0)
            self._push(_Open(bound, self.age, sub.fixed(verdict), True, rest))

    def _offer(self, sub: Subproblem, picked: npt.NDArray[np.bool_]) -> None:
        """Take a choice as the incumbent if it is better, by its recomputed objective."""
        mask = sub.whole_mask(picked, self.problem.n)
        if self.problem.constraints is not None and self.problem.constraints.broken_by(torch.from_numpy(mask)):
            return
        value, allowed = self._exact(mask)
        if value < self.value:
            self.floor = min(self.floor, self.cutoff)
            self.mask, self.value, self.allowed = mask, value, allowed
            self._report()

    def _exact(self, mask: npt.NDArray[np.bool_]) -> tuple[float, float]:
        """f of a choice, recomputed, and the tolerance for the rounding of its weights."""
        chosen = torch.from_numpy(mask).to(self.problem.W.device)
        value, allowed = self.problem.weights.objective(chosen), rounding(self.problem, chosen)
        return float(value) / self.scale, float(allowed) / self.scale

    def _report(self, bound: float = -math.inf) -> None:
        self.known_bound = max(self.known_bound, min(bound, self.value))
        self.run.report(0, self.value * self.scale, self.known_bound * self.scale, self.mask)
