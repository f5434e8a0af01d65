r"""Tabu search over exchanges, with memetic restarts: usually optimal, for weights of any sign, up to thousands of
vertices.

Maths: every iteration makes the best exchange of a chosen vertex for another, neither of them moved recently, even if f
grows; :math:`\Delta f = W_{ii} - 2 s_i + W_{jj} + 2 s_j - 2 W_{ij}` with :math:`s = W 1_S` kept up to date. After
`restart_after` iterations without improvement the search restarts from two elite sets combined, or from the best set
perturbed. Complexity O(n) per iteration plus the pairs that bounds cannot rule out, O(n²) at worst; s is recomputed,
O(k n), when a weight that leaves dwarfs what remains, and before a set is accepted as the best. Guarantee: never worse
than its start, compared by sums that keep their rounding errors. Always exactly k vertices; the same seed gives the
same answer unless time ends the search. On W in factors with more than some thousand vertices it searches windows of
about a thousand, promising ones first and then random ones, the others fixed. References: Palubeckis, Appl. Math.
Comput. 189 (2007); Zhou, Hao & Duval, IEEE T. Evol. Comput. 21 (2017); Nogueira et al. (2025) for the GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grace_opt.errors import OptionError
from grace_opt.kernels._shared.limits import FEW_EXCHANGED
from grace_opt.kernels.solve.columns.reference.exchange import ACCEPTING, BEGINNING, ExchangeState, window_size
from grace_opt.kernels.solve.sparse.pace import Pace
from grace_opt.kernels.solve.sparse.tabu import ELITE_SETS, TabuSearch
from grace_opt.parallel import map_in_threads
from grace_opt.problem import FactoredWeights, Problem, SparseWeights, Weights
from grace_opt.registry import check_fields, integer, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult
from grace_opt.starts import starting_masks

#: Iterations per vertex in all (if no limit is given) and before a restart.
ITERATIONS_PER_VERTEX, RESTART_AFTER_PER_VERTEX = 20, 2
#: Per vertex that can be exchanged, where these are few: a descent is short then, and all sets near it are soon seen.
RESTART_AFTER_PER_EXCHANGED = 8
#: A moved vertex is blocked for this many iterations plus a random number up to as many, unless k or n - k is small.
TENURE = 10
#: More iterations than any search has; numbers up to twice as many fit into 64 bits.
FOREVER = 2**60
#: Least share of promising vertices in a window of W in factors, after rounds without a better choice.
RANDOM_AT_MOST = 0.125
#: Pairs of exchanges (n iterations' worth of work, roughly) between two looks at the clock.
WORK_BETWEEN_CLOCK_CHECKS = 2_000_000
#: Most iterations on a sparse graph between two looks at the clock; seconds per stored entry until the first, roughly.
SPARSE_ITERATIONS_PER_LOOK, SECONDS_TO_BEGIN = 3000, 3.5e-8


@dataclass(frozen=True)
class TabuOptions:
    """Options of `tabu`.

    Attributes
    ----------
    start : str, bool mask (..., n), or int indices (..., k)
        Where to start: a method's name, or a choice of k vertices by number (for a graph, positions in
        ``list(graph.nodes)``) or as a mask.
    iterations : int or None
        Number of exchanges per instance; None: 20 n (at least 1000), or as many as the time limit allows.
    restart_after : int or None
        Number of iterations without improvement before a restart; None: 2 n, at least 100. If k or n - k is below 16,
        8 times that, from 20 to 2 n.
    tenure : int or None
        Least number of iterations for which a moved vertex is blocked; None: 10, less if k or n - k is below 40.
    """

    start: Any = "mies"
    iterations: int | None = None
    restart_after: int | None = None
    tenure: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.start, str) and self.start == "tabu":
            raise OptionError("start='tabu' would start from itself: name another method, a mask or indices.")
        check_fields(self, integer, "iterations", at_least=0, optional=True)
        check_fields(self, integer, "restart_after", "tenure", at_least=1, optional=True)


@register_solver(
    "tabu",
    options=TabuOptions,
    batched=True,
    guarantee="never worse than its start",
    compiled=True,
    searches=True,
    forms=("sparse", "factored"),
)
def tabu(problem: Problem, options: TabuOptions, run: Run) -> SolverResult:
    """Exchange vertices, even uphill, with memory; usually optimal, proves nothing."""
    masks = starting_masks(problem, options.start, run)
    run.ctrl_c_stops()
    run.begin()
    return _searched(problem.weights, problem, masks, options, run)


@singledispatch
def _searched(W: Weights, problem: Problem, masks: Tensor, options: TabuOptions, run: Run) -> SolverResult:
    """Search all instances together, a slice each."""
    start, (kind, seconds) = masks.cpu().numpy(), _kind(W)
    searches = [kind(problem.instance(b), start[b], options, run.instance(b)) for b in range(len(start))]
    waiting = searches if run.has_time(seconds) else []
    while waiting := [search for search in waiting if not search.done and not search.run.expired()]:
        map_in_threads(kind.advance, waiting, run)
    mask = torch.from_numpy(np.stack([search.mask() for search in searches])).to(masks.device)
    limit = torch.tensor([not search.done for search in searches], dtype=torch.bool, device=masks.device)
    return SolverResult(mask, limit=limit, stats={"iterations": sum(search.spent for search in searches)})


@_searched.register
def _by_columns(W: FactoredWeights, problem: Problem, mask: Tensor, options: TabuOptions, run: Run) -> SolverResult:
    """Search windows of promising and of random vertices, one small dense problem after the other."""
    limit, spent = torch.zeros_like(problem.k, dtype=torch.bool), 0
    default = 2**62 if run.limited else max(1000, ITERATIONS_PER_VERTEX * problem.n)
    budget = default if options.iterations is None else options.iterations
    seconds = W.product_seconds() / len(mask)
    inner = replace(run.beside_search(), callback=None, numbers=None).leaving(ACCEPTING * seconds)
    for b in range(len(mask)):
        left, its = budget, run.instance(b) if len(mask) == 1 else run.instance(b).until(1 / (len(mask) - b))
        if not its.has_time(BEGINNING * seconds):
            limit[b] = True
            continue
        generator = torch.Generator(device="cpu").manual_seed(run.seed)
        choice, share = ExchangeState(W[b], mask[b], problem.candidates[b]), 1.0
        if not 0 < int(problem.k[b]) < int(problem.candidates[b].sum()):
            left = 0
        while left > 0 and its.has_time(ACCEPTING * seconds):
            vertices = _window(choice, share, generator)
            block, k, inside = choice.window(vertices)
            part = Problem.of(block[None], k, check=False)
            count = min(left, max(1000, ITERATIONS_PER_VERTEX * len(vertices)))
            found = tabu(part, replace(options, start=inside[None], iterations=count), inner)
            left, spent = left - count, spent + count
            better = choice.accept(vertices, found.mask[0])
            share = 1.0 if better else max(share / 2, RANDOM_AT_MOST)  # from promising vertices to random ones
            if better or left + count == budget:
                its.report(0, choice.value, -np.inf, choice.mask.cpu().numpy())
        limit[b], mask[b] = left > 0, choice.mask
    return SolverResult(mask, limit=limit, stats={"iterations": spent})


def _window(choice: ExchangeState, share: float, generator: torch.Generator) -> Tensor:
    """This share of a window is promising vertices, the rest random ones, chosen and not."""
    size = window_size()
    taken = choice.promising(max(2, int(share * size)))
    order = torch.randperm(len(choice.mask), generator=generator, device="cpu").to(taken.device)
    rest = order[choice.candidates[order] & ~torch.isin(order, taken)]
    inside, outside = rest[choice.mask[rest]], rest[~choice.mask[rest]]
    inside = inside[: max((size - len(taken)) // 2, size - len(taken) - len(outside))]
    return torch.cat([taken, inside, outside[: size - len(taken) - len(inside)]]).sort().values


def _usual_restart(n: int, least: int) -> int:
    """Return after how many iterations without improvement to restart, where so few vertices can be exchanged."""
    if least < FEW_EXCHANGED:
        return max(20, min(RESTART_AFTER_PER_VERTEX * n, RESTART_AFTER_PER_EXCHANGED * least))
    return max(100, RESTART_AFTER_PER_VERTEX * n)


class _Search:
    """One instance's search, which can be advanced slice by slice."""

    def __init__(self, problem: Problem, start: npt.NDArray[np.bool_], options: TabuOptions, run: Run) -> None:
        self.problem, self.run, self.n, self.spent = problem, run, problem.n, 0
        alive = problem.candidates.cpu().numpy()
        self.free, self.k = np.flatnonzero(alive), int(problem.k)
        m = len(self.free)
        self.best = start[self.free].copy()
        least = min(self.k, m - self.k)
        default = 2**62 if run.limited else max(1000, ITERATIONS_PER_VERTEX * m)
        self.budget = 0 if least == 0 else default if options.iterations is None else options.iterations
        if self.budget == 0:
            return
        self.restart_after = min(options.restart_after or _usual_restart(m, least), FOREVER)
        self.tenure = min(options.tenure or max(1, min(TENURE, least // 4)), FOREVER)
        entropy = np.random.SeedSequence(run.seed).generate_state(1, np.uint64)
        self.random = np.maximum(entropy, np.uint64(1))  # xorshift must not start at 0
        self._set_up(problem, alive)

    def _set_up(self, problem: Problem, alive: npt.NDArray[np.bool_]) -> None:
        m, W = len(self.free), problem.W.detach().to("cpu").double().numpy()
        self.W = np.ascontiguousarray(W if m == problem.n else W[np.ix_(alive, alive)])
        self.x, self.sums, self.until = self.best.copy(), np.empty(m), np.zeros(m, np.int64)
        self.values = np.full(4, np.inf)
        self.elites, self.elite_values = np.zeros((ELITE_SETS, m), bool), np.zeros(ELITE_SETS)
        self.state = np.zeros(4, np.int64)
        self.top, self.heavy, self.grain = np.empty(0), np.empty(0), np.inf

    @property
    def done(self) -> bool:
        return self.spent >= self.budget

    def advance(self) -> None:
        """Search for one slice."""
        from grace_opt.kernels.solve.tabu import cpu as compiled

        if not len(self.top):
            self.top, self.heavy = np.empty((2, len(self.free)))
            compiled.row_maxima(self.W, self.top)
            self.grain = compiled.scales(self.W, self.heavy)
            value, self.values[3] = compiled.fill_sums(self.W, self.x, self.sums)
            self.values[:3] = value
        m, before = len(self.free), self.values[1]
        count = min(self.budget - self.spent, max(16, WORK_BETWEEN_CLOCK_CHECKS // (self.k * (m - self.k) + 8 * m)))
        compiled.run(
            *(self.W, self.top, self.heavy, self.grain, self.k, self.x, self.sums, self.until, self.best, self.values),
            *(self.elites, self.elite_values, self.state, self.random, count, self.restart_after, self.tenure),
        )
        self.spent += count
        if self.values[1] < before or self.spent == count:
            self.run.report(0, self._value(), -np.inf, self.mask())

    def _value(self) -> float:
        """f of the best choice so far; with a target, equal to `Solution.objective` to the last bit."""
        if not self.run.targets:
            return float(self.values[1])
        return float(self.problem.weights.objective(torch.from_numpy(self.mask()).to(self.problem.k.device)))

    def mask(self) -> npt.NDArray[np.bool_]:
        """The best choice so far, in the instance's numbering."""
        whole = np.zeros(self.n, bool)
        whole[self.free[self.best]] = True
        return whole


@singledispatch
def _kind(W: Weights) -> tuple[type[_Search], float]:
    """The search of one instance, and seconds until its first iteration."""
    return _Search, 0.0


@_kind.register
def _sparse_kind(W: SparseWeights) -> tuple[type[_Search], float]:
    return _SparseSearch, SECONDS_TO_BEGIN * W.numel()


class _SparseSearch(_Search):
    """The same over the edges of a sparse graph."""

    def _set_up(self, problem: Problem, alive: npt.NDArray[np.bool_]) -> None:
        self.alive, self.started, self.pace = alive, False, Pace(SPARSE_ITERATIONS_PER_LOOK)

    def advance(self) -> None:
        """Search for one slice."""
        if not self.started:
            graph = self.problem.weights.in_form(SparseWeights, "tabu").graph(torch.from_numpy(self.alive))
            self.search = TabuSearch(graph, self.best, self.restart_after, self.tenure, self.random)
            self.started = True
        before, count = self.search.value, min(self.budget - self.spent, self.pace.steps)
        began, first = time.monotonic(), not self.spent
        self.search.advance(count)
        self.pace.took(count, time.monotonic() - began)
        self.spent += count
        if self.search.value < before or first:
            self.run.report(0, self._value(), -np.inf, self.mask() if self.run.callback else self.best)

    def _value(self) -> float:
        """f of the best choice so far, exactly."""
        mask = self.mask()
        if self.run.targets:
            return float(self.problem.weights.objective(torch.from_numpy(mask)))
        return self.search.value

    def mask(self) -> npt.NDArray[np.bool_]:
        """The best choice so far, in the instance's numbering."""
        if self.budget and self.started:
            self.best = self.search.settle()
        return super().mask()
