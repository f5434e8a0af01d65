r"""Portfolio: several methods in turn, for the best answer in the time given, with a certificate. Use it when in doubt.

Without a time limit: both greedy methods, tabu search from the better one, and `grace_opt.bounds.certificate` for that
answer. With one: the same, then, for instances not yet proved, branch and bound for a tenth of the remaining time. If
the gap is small by then, or shrinks fast enough, branch and bound for half of what is left (it ends early if it proves
the optimum); then tabu search again until the limit. Above 2000 vertices, tabu search all the time. For sparse W, both
greedy methods, `annealing`, on small graphs some tabu search, and the certificate: a time limit is annealing's but for
a share. For W in factors with more than some thousand vertices: both greedy methods, tabu search until the limit, and
the certificate. A step that does not fit into the remaining time is skipped, including `drop_greedy` and the bound for
large W. Under constraints: `local_search`, the certificate, and, with a time limit, branch and bound. Complexity: the
sum of its parts. Guarantee: never worse than `mies` (which takes no constraints), and, given the time, never worse than
`drop_greedy` or a local optimum of exchanges, and with a bound. Reference: Huberman, Lukose & Hogg, Science 275 (1997).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from grace_opt import bounds, registry
from grace_opt.bounds.qcr import LARGEST_RELAXED, SECONDS_PER_CUBE
from grace_opt.bounds.sparse import least_seconds
from grace_opt.problem import FactoredWeights, Problem, SparseWeights, Weights
from grace_opt.registry import check_fields, choice, integer, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult, proved

#: Approximate seconds of `drop_greedy` per entry of W; and of sparse W, where it gets at most a share of the time.
SECONDS_TO_DROP, SECONDS_TO_DROP_EDGES, EDGES_SHARE = 2e-8, 6e-7, 0.1
#: The bound of sparse W gets that share, or as much as the least bound takes, up to this share.
BOUND_SHARE = 0.33
#: Up to this many vertices of sparse W, tabu search gets that share too, after annealing.
LARGEST_FOR_TABU = 5000
#: Share of the time in which `mies` must be done with W in factors: a single exchange gains less than greedy.
MOST_OF_IT = 0.9
#: Shares of the remaining time that branch and bound gets: a probe, of at least so many seconds unless that is more
#: than half, and half if the probe gives hope.
PROBE, LEAST_PROBE, HALF = 0.1, 0.5, 0.5
#: A gap this small, relative to f, gives hope; or one that so many probes would close, at the rate of the first.
CLOSE, PATIENT = 0.1, 20


@dataclass(frozen=True)
class PortfolioOptions:
    """Options of `portfolio`.

    Attributes
    ----------
    iterations : int or None
        Exchanges per instance of the first tabu search; None: 20 n, at least 1000.
    bound : {"fast", "tight"}
        Level of `grace_opt.bounds.certificate` for the bound returned with the answer.
    """

    iterations: int | None = None
    bound: str = "fast"

    def __post_init__(self) -> None:
        check_fields(self, integer, "iterations", at_least=0, optional=True)
        check_fields(self, choice, "bound", allowed=bounds.LEVELS)


@register_solver(
    "portfolio",
    options=PortfolioOptions,
    batched=True,
    guarantee="never worse than mies and drop_greedy",
    compiled=True,
    searches=True,
    forms=("sparse", "factored"),
    constraints=True,
)
def portfolio(problem: Problem, options: PortfolioOptions, run: Run) -> SolverResult:
    """Greedy, tabu search and a certificate; with a time limit, also branch and bound and more tabu search."""
    if problem.constraints is not None:
        return _constrained(problem.dense("portfolio under constraints"), options, run)
    return _found(problem.weights, problem, options, run)


def _constrained(problem: Problem, options: PortfolioOptions, run: Run) -> SolverResult:
    """Local search and a certificate; with a time limit, then branch and bound until that."""
    found = _call("local_search", problem, run.leaving(bounds.seconds_to_certify(problem, options.bound)))
    mask, stats = found.mask, dict(found.stats)
    run.ctrl_c_stops()
    bound = bounds.certificate(problem, options.bound, incumbent=mask, run=run.beside_search())
    open_ = ~proved(problem, mask, problem.weights.objective(mask), bound)
    if run.limited:
        stats |= {"nodes": 0, "strong_bounds": 0}
    if run.limited and bool(open_.any()) and problem.n <= LARGEST_RELAXED and not run.expired():
        exact = _call("branch_and_bound", problem, run, start=mask)
        mask = _better(problem, mask, exact.mask)
        bound, stats = torch.maximum(bound, exact.lower_bound.to(bound)), stats | dict(exact.stats)  # type: ignore[union-attr]
        open_ = ~proved(problem, mask, problem.weights.objective(mask), bound)
    return SolverResult(mask, bound, open_ & run.limited, stats, certified=options.bound)


@singledispatch
def _found(W: Weights, problem: Problem, options: PortfolioOptions, run: Run) -> SolverResult:
    """The turns for W as a tensor."""
    mask = _call("mies", problem, run).mask
    run.ctrl_c_stops()
    if not run.expired() and (not run.limited or run.has_time(SECONDS_TO_DROP * W.numel())):
        still = torch.tensor(run.open(), dtype=torch.bool, device=mask.device) if run.targets else problem.k >= 0
        better = _better(problem, mask, _call("drop_greedy", problem, run).mask)
        mask = torch.where(still.unsqueeze(-1), better, mask)  # a choice that is good enough stays
    count = max(1000, 20 * problem.n) if options.iterations is None else options.iterations
    search = run.leaving(bounds.seconds_to_certify(problem, options.bound))
    first = _call("tabu", problem, search, start=mask, iterations=count)
    mask = _better(problem, mask, first.mask)
    stats = dict(first.stats)
    bound = bounds.certificate(problem, options.bound, incumbent=mask, run=run.beside_search())
    open_ = ~proved(problem, mask, problem.weights.objective(mask), bound)
    limit = torch.zeros_like(open_)
    if run.limited:
        stats |= {"nodes": 0, "strong_bounds": 0}
    if run.limited and bool(open_.any()):
        rows = open_.nonzero().squeeze(-1)
        part, told = problem.instances(rows), run.instances(rows.tolist())
        if problem.n <= LARGEST_RELAXED and run.has_time(SECONDS_PER_CUBE * problem.n**3):
            _prove(part, rows, mask, bound, told, stats)
        limit = ~proved(problem, mask, problem.weights.objective(mask), bound)
        if bool(limit.any()) and not run.expired():
            rows = limit.nonzero().squeeze(-1)
            part = problem.instances(rows)
            last = _call("tabu", part, run.instances(rows.tolist()), start=mask[rows])
            mask[rows] = _better(part, mask[rows], last.mask)
            stats["iterations"] += last.stats["iterations"]
    return SolverResult(mask, bound, limit, stats, certified=options.bound)


def _prove(problem: Problem, rows: Tensor, mask: Tensor, bound: Tensor, run: Run, stats: dict[str, Any]) -> None:
    """Branch and bound for these rows of `mask` and `bound`, in place: a short probe, then those that it gives hope."""
    left, part, told = rows, problem, run
    seconds = max(run.deadline - time.monotonic(), 1e-9)
    for share in (min(HALF, max(PROBE, LEAST_PROBE / seconds)), HALF):
        before = bound[left]
        exact = _call("branch_and_bound", part, told.until(share), start=mask[left])
        mask[left] = _better(part, mask[left], exact.mask)
        bound[left] = torch.maximum(bound[left], exact.lower_bound.to(bound))  # type: ignore[union-attr]
        for name in ("nodes", "strong_bounds"):
            stats[name] += exact.stats[name]
        value = part.weights.objective(mask[left])
        gap, gained = value - bound[left], bound[left] - before
        hope = ((gap <= CLOSE * value.abs()) | (gap <= PATIENT * gained)) & ~proved(
            part, mask[left], value, bound[left]
        )
        places = hope.nonzero().squeeze(-1)
        left, part, told = left[places], part.instances(places), told.instances(places.tolist())
        if not len(left) or told.expired():
            break


@_found.register
def _of_edges(W: SparseWeights, problem: Problem, options: PortfolioOptions, run: Run) -> SolverResult:
    """Greedy, annealing, tabu search on small graphs, and a certificate; for sparse W."""
    mask, entries = _call("mies", problem, run).mask, W.numel()
    run.ctrl_c_stops()
    if not run.expired() and (not run.limited or run.has_time(SECONDS_TO_DROP_EDGES * entries / EDGES_SHARE)):
        better = _better(problem, mask, _call("drop_greedy", problem, run).mask)
        mask = mask if run.targets and not run.open()[0] else better
    seconds, left = bounds.seconds_to_certify(problem, options.bound), run.deadline - time.monotonic()
    share = max(EDGES_SHARE * left, min(least_seconds(problem), BOUND_SHARE * left), 0.0)
    search = run.leaving(min(seconds, share) if run.limited else seconds)
    small = problem.n <= LARGEST_FOR_TABU
    found = _call("annealing", problem, search.until(1 - EDGES_SHARE) if small else search, start=mask)
    mask, stats = _better(problem, mask, found.mask), dict(found.stats)
    if small or options.iterations is not None:
        count = 20 * problem.n if options.iterations is None and not run.limited else options.iterations
        found = _call("tabu", problem, search, start=mask, iterations=count)
        mask = _better(problem, mask, found.mask)
        stats["iterations"] += found.stats["iterations"]
    return _certified("annealing", problem, mask, stats, options, run)


@_found.register
def _by_columns(W: FactoredWeights, problem: Problem, options: PortfolioOptions, run: Run) -> SolverResult:
    """Greedy, tabu search until the limit less the time of a certificate, and that, for W that is never formed."""
    search = run.leaving(bounds.seconds_to_certify(problem, options.bound))
    first = _call("mies", problem, search.until(MOST_OF_IT))  # in blocks, if it must be
    run.ctrl_c_stops()
    mask = first.mask
    if first.limit is not None and bool(first.limit.any()) and run.has_time(2 * W.product_seconds()):
        mask = _better(problem, mask, _call("think", problem, run).mask)  # large blocks may overshoot
    if search.has_time(2 * W.product_seconds()):
        mask = _better(problem, mask, _call("drop_greedy", problem, search.until(0.5)).mask)
    count = None if run.limited else max(1000, 20 * W.n)
    count = count if options.iterations is None else options.iterations
    found = _call("tabu", problem, search, start=mask, iterations=count)
    mask, stats = _better(problem, mask, found.mask), dict(found.stats)
    return _certified("tabu", problem, mask, stats, options, run)


def _certified(
    name: str, problem: Problem, mask: Tensor, stats: dict[str, Any], options: PortfolioOptions, run: Run
) -> SolverResult:
    """Add a certificate; if it has left some of a time limit, search what is not proved until then, by this method."""
    bound = bounds.certificate(problem, options.bound, incumbent=mask, run=run.beside_search())
    open_ = ~proved(problem, mask, problem.weights.objective(mask), bound)
    rows = open_.nonzero().squeeze(-1)
    if run.limited and run.patience == math.inf and options.iterations is None and len(rows) and not run.expired():
        part, told = problem.instances(rows), replace(run.instances(rows.tolist()), seed=run.seed + 1)
        found = _call(name, part, told, start=mask[rows])
        mask[rows] = _better(part, mask[rows], found.mask)
        stats["iterations"] += found.stats["iterations"]
    return SolverResult(mask, bound, open_ & run.limited, stats, certified=options.bound)


def _call(name: str, problem: Problem, run: Run, **options: Any) -> SolverResult:
    spec = registry.get(name)
    return spec.solve(problem, spec.make_options(options), run)


def _better(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The better of two masks per instance; the first where they are equal."""
    wins = problem.weights.objective(b) < problem.weights.objective(a)
    return torch.where(wins.unsqueeze(-1), b, a)
