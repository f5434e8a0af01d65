r"""Simulated annealing over exchanges: the best answers for sparse W and for thousands of vertices, in seconds.

Maths: a chosen vertex i and another j are drawn at random, and exchanged if f then rises by less than T times an
exponential random number; :math:`\Delta f = c_j - c_i - 2 W_{ij}` from costs :math:`c_v = W_{vv} + 2 \sum_{u \in S, u
\neq v} W_{uv}` that are kept up to date. T falls geometrically, from a temperature at which about one in fifty
exchanges of the start would be made, to a tenth of it. Exchanges that are refused, almost all, cost O(1); those that
are made cost O(n), or the degrees of both vertices if W is sparse: this is what makes it faster than `tabu`, which
looks for the best exchange. Then `local_search` from the best set. Complexity `sweeps` times n proposals. Guarantee:
never worse than its start, compared by exact sums; unless a limit ended it, no exchange improves the answer. The same
seed gives the same answer unless time ends the search. Reference: Kirkpatrick, Gelatt & Vecchi, Science 220 (1983).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from grace_opt import registry
from grace_opt.errors import OptionError
from grace_opt.kernels.solve.annealing.moves import DenseMoves, SparseMoves
from grace_opt.parallel import map_in_threads
from grace_opt.problem import Problem, SparseWeights, Weights
from grace_opt.registry import check_fields, integer, number, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult
from grace_opt.starts import starting_masks

Bools = npt.NDArray[np.bool_]
#: The hottest temperature accepts this share of random exchanges; less if there are fewer sweeps than this. More, up to
#: the last, if there are more proposals than sweeps ask for, as W is small: one high step may hide its optimum.
ACCEPTED, FULL_SWEEPS, MOST_ACCEPTED = 0.02, 200, 0.1
#: How many exchanges it is measured on, and how much colder it is at the end.
SAMPLE, COOLING = 4096, 10.0
#: Each round has so many times the sweeps of the one before; least number of proposals of a round.
GROWTH, LEAST = 4, 20_000
#: Proposals between two looks at the clock, fewer for more than so many entries of W, which lie all over the memory.
SLICE, LARGE, SLICE_OF_LARGE = 100_000, 2_000_000, 20_000
#: Approximate seconds per stored entry of sparse W until the first proposal.
SECONDS_TO_BEGIN = 1.2e-8
#: The local search at the end gets so many seconds per stored entry of W, but no more than this share of the time.
SECONDS_TO_POLISH, POLISHING_SHARE = 1e-7, 0.05


@dataclass(frozen=True)
class AnnealingOptions:
    """Options of `annealing`.

    Attributes
    ----------
    start : str, bool mask (..., n), or int indices (..., k)
        The first set, which only matters if nothing better is found: a method's name, or a choice of k vertices by
        number (for a graph, positions in ``list(graph.nodes)``) or as a mask.
    sweeps : int
        Proposals per vertex in the first round.
    restarts : int or None
        Rounds after the first, each with 4 times the sweeps of the one before; None: none (one for small W), or as
        many as fit into the time limit, the last of them slowed down to fill it.
    hot, cold : float or None
        First and last temperature, in units of f. None: measured (see the page of the method), and a tenth of `hot`.
    """

    start: Any = "mies"
    sweeps: int = 500
    restarts: int | None = None
    hot: float | None = None
    cold: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.start, str) and self.start == "annealing":
            raise OptionError("start='annealing' would start from itself: name another method, a mask or indices.")
        check_fields(self, integer, "sweeps", at_least=1)
        check_fields(self, integer, "restarts", at_least=0, optional=True)
        check_fields(self, number, "hot", "cold", above=0, optional=True)
        if self.hot is not None and self.cold is not None and self.cold > self.hot:
            raise OptionError(f"cold={self.cold:g} is above hot={self.hot:g}: temperatures fall.")


@register_solver(
    "annealing",
    options=AnnealingOptions,
    batched=True,
    guarantee="never worse than its start",
    compiled=True,
    searches=True,
    forms=("sparse",),
)
def annealing(problem: Problem, options: AnnealingOptions, run: Run) -> SolverResult:
    """Exchange vertices at random, uphill less and less often; the best answers for large or sparse W."""
    start = starting_masks(problem, options.start, run)
    run.ctrl_c_stops()
    run.begin()
    masks, most = start.cpu().numpy(), POLISHING_SHARE * max(0.0, run.deadline - time.monotonic())
    left = run.leaving(min(SECONDS_TO_POLISH * problem.weights.numel(), most))
    searches = [_Search(problem.instance(b), masks[b], options, left.instance(b)) for b in range(len(masks))]
    waiting = searches if run.has_time(_pace(problem.weights)[0]) else []
    while waiting := [search for search in waiting if not search.done and not search.run.expired()]:
        map_in_threads(_Search.advance, waiting, run)
    mask = torch.from_numpy(np.stack([search.mask() for search in searches])).to(start.device)
    limit = torch.tensor([not search.done for search in searches], dtype=torch.bool, device=start.device)
    stats = {"iterations": sum(search.spent for search in searches), "exchanges": sum(s.made for s in searches)}
    if not run.expired():
        local = registry.get("local_search")
        mask = local.solve(problem, local.make_options({"start": mask}), run).mask
    return SolverResult(mask, limit=limit, stats=stats)


@singledispatch
def _pace(W: Weights) -> tuple[float, int]:
    """Seconds until the first proposal, and proposals between two looks at the clock."""
    return 0.0, SLICE


@_pace.register
def _sparse_pace(W: SparseWeights) -> tuple[float, int]:
    return SECONDS_TO_BEGIN * W.numel(), SLICE_OF_LARGE if W.numel() > LARGE else SLICE


@singledispatch
def _moves(W: Weights, alive: Bools, x: Bools, random: npt.NDArray[np.uint64]) -> DenseMoves:
    """The set x of candidates, `alive`, to be annealed."""
    dense = W.tensor.detach().to("cpu").double().numpy()
    return DenseMoves(np.ascontiguousarray(dense if alive.all() else dense[np.ix_(alive, alive)]), x, random)


@_moves.register
def _sparse_moves(W: SparseWeights, alive: Bools, x: Bools, random: npt.NDArray[np.uint64]) -> DenseMoves:
    return SparseMoves(W.graph(torch.from_numpy(alive)), x, random)


class _Search:
    """One instance's search, which can be advanced slice by slice."""

    def __init__(self, problem: Problem, start: npt.NDArray[np.bool_], options: AnnealingOptions, run: Run) -> None:
        self.problem, self.options, self.run = problem, options, run
        self.alive, self.k = problem.candidates.cpu().numpy(), int(problem.k)
        self.sure = start[self.alive]
        self.size, self.spent, self.made, self.value = len(self.sure), 0, 0, math.inf
        self.done = self.k in (0, self.size)
        _, self.slice = _pace(problem.weights)
        # This round: its number, proposals in all and so far, how far the temperature has fallen, whether it is slowed
        # down to fill the time, whether it is over; seconds per proposal.
        self.round, self.total, self.spent_here, self.progress, self.last, self.ended = -1, 0, 0, 0.0, False, True
        self.round_began = self.until = self.pace = 0.0
        self.hot = self.cold = 1.0

    def advance(self) -> None:
        """Search for one slice."""
        began = time.monotonic()
        if self.ended:
            self._begin_round(began)
        moves = self.moves
        count = min(self.slice, self.total - self.spent_here) if not self.last else self.slice
        share = count / self.total
        if self.last:
            share = (1 - self.progress) * min(1.0, count * self.pace / max(self.until - began, 1e-9))
        after = min(1.0, self.progress + share)
        before, best = self._temperature(self.progress), moves.values[1]
        self.made += moves.anneal(before, self._temperature(after), count)
        self.progress, self.spent, self.spent_here = after, self.spent + count, self.spent_here + count
        now = time.monotonic()
        self.pace = (now - self.round_began) / self.spent_here
        if not self.last and self.run.limited and self.options.restarts is None:
            self.last = self._must_be_last(now)
        if moves.values[1] < best or self.spent == count:
            self.run.report(0, self._value(), -math.inf, self.mask() if self.run.callback else self.sure)
        self.ended = self.spent_here >= self.total if not self.last else now >= self.until or after >= 1.0
        if self.ended:
            self._settle()
            rounds = self.options.restarts
            if rounds is None and not self.run.limited:
                rounds = int(self._is_small)
            self.done = rounds == self.round

    def _begin_round(self, now: float) -> None:
        self.round += 1
        if self.round == 0:
            self.value = self._exact(self.sure)
        else:
            self.moves.refresh()
        sweeps = self._sweeps(self.round)
        self.total = self._proposals(self.round)
        self.spent_here, self.progress, self.round_began, self.last = 0, 0.0, now, False
        self.until = min(self.run.deadline, now + self.run.patience / 2)
        if self.run.limited and self.options.restarts is None and self.pace:
            self.last = self._must_be_last(now)
            sweeps = int(min(sweeps, (self.until - now) / self.pace / self.size))
        self._set_temperatures(sweeps)

    def _must_be_last(self, now: float) -> bool:
        """Whether there will be no time for another round after this one."""
        rest = (self.total - self.spent_here) * self.pace
        return bool(now + rest + self._proposals(self.round + 1) * self.pace > self.until)

    @property
    def _is_small(self) -> bool:
        """Whether sweeps ask for fewer proposals than there are."""
        return self.options.sweeps * self.size < LEAST

    def _sweeps(self, round_: int) -> int:
        """Proposals per vertex of a round."""
        return int(self.options.sweeps * GROWTH**round_)

    def _proposals(self, round_: int) -> int:
        return max(LEAST, self._sweeps(round_) * self.size)

    @cached_property
    def moves(self) -> DenseMoves:
        """The set that is annealed; made when the search begins."""
        entropy = np.random.SeedSequence(self.run.seed).generate_state(1, np.uint64)
        random = np.maximum(entropy, np.uint64(1))  # xorshift must not start at 0
        return _moves(self.problem.weights, self.alive, self.sure, random)

    def _set_temperatures(self, sweeps: float) -> None:
        """The hottest and the coldest temperature of this round."""
        given = self.options
        spare = self.total / (self._sweeps(self.round) * self.size)
        share = min(ACCEPTED * min(1.0, max(sweeps, 1) / FULL_SWEEPS) * spare, MOST_ACCEPTED)
        self.hot = temperature_accepting(self.moves.changes(SAMPLE), share) if given.hot is None else given.hot
        self.cold = self.hot / COOLING if given.cold is None else given.cold
        self.hot = max(self.hot, self.cold)

    def _temperature(self, progress: float) -> float:
        return float(self.hot * (self.cold / self.hot) ** progress)

    def _value(self) -> float:
        """f of the best choice so far; with a target, equal to `Solution.objective` to the last bit."""
        if self.run.targets:
            self._settle()
            return self.value
        return float(self.moves.values[1])

    def _settle(self) -> None:
        """Sum the best set's f exactly, and keep it if it is better than the last one that was."""
        if self.round < 0 or self.moves.values[1] == self.value:
            return
        exact = self._exact(self.moves.best.x)
        if exact < self.value:
            self.sure, self.value = self.moves.best.x.copy(), exact
        self.moves.values[1] = self.value

    def _exact(self, x: npt.NDArray[np.bool_]) -> float:
        mask = torch.from_numpy(self._whole(x)).to(self.problem.k.device)
        return float(self.problem.weights.objective(mask))

    def _whole(self, x: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        whole = np.zeros(self.problem.n, bool)
        whole[self.alive] = x
        return whole

    def mask(self) -> npt.NDArray[np.bool_]:
        """The best choice so far, in the instance's numbering."""
        self._settle()
        return self._whole(self.sure)


def temperature_accepting(changes: npt.NDArray[np.float64], share: float) -> float:
    """The temperature at which this share of the changes of f that are positive would be accepted.

    Examples
    --------
    >>> round(temperature_accepting(np.array([1.0, 1.0]), math.exp(-2)), 6)
    0.5
    """
    up = changes[changes > 0]
    if not len(up):  # f cannot rise from here: any temperature will do that grows with W
        return float(np.abs(changes).max(initial=0.0)) or 1.0
    largest = float(up.max())
    down, low, high = -up / largest, 1e-18, 1e3
    for _ in range(100):
        before, middle = (low, high), math.sqrt(low * high)
        low, high = (low, middle) if np.exp(down / middle).mean() > share else (middle, high)
        if (low, high) == before:  # no number lies between them: the rest would change nothing
            break
    return max(high * largest, float(np.finfo(np.float64).smallest_subnormal))
