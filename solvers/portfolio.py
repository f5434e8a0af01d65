r"""Portfolio: several methods in turn, for the best answer in the time given, with a certificate. Use it when in doubt.

Without a time limit: both greedy methods, tabu search from the better one, and `grace_opt.bounds.certificate` for that
answer. With one: the same, then, for instances not yet proved, branch and bound for half of the remaining time (it ends
early if it proves the optimum), and tabu search again until the limit; above 2000 vertices, tabu search all the time. A
step that does not fit into the remaining time is skipped, including `drop_greedy` and the bound for large W. Of W in
factors with more than some thousand vertices: greedy, tabu search until the limit, and the certificate. Complexity: the
sum of its parts. Guarantee: never worse than `mies`, and, given the time, never worse than `drop_greedy` or a local
optimum of exchanges, and with a bound. Reference: Huberman, Lukose & Hogg, Science 275 (1997).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grace_opt import bounds, objective, registry
from grace_opt.bounds.qcr import LARGEST_RELAXED, SECONDS_PER_CUBE
from grace_opt.kernels.columns.source import ColumnWeights
from grace_opt.problem import Problem
from grace_opt.registry import check_fields, choice, integer, register
from grace_opt.run import Run
from grace_opt.solution import Result, proved

#: Approximate seconds of `drop_greedy` per entry of W.
SECONDS_TO_DROP = 2e-8


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


@register(
    "portfolio",
    options=PortfolioOptions,
    batched=True,
    guarantee="never worse than mies and drop_greedy",
    compiled=True,
    searches=True,
    forms=("factored",),
)
def portfolio(problem: Problem, options: PortfolioOptions, run: Run) -> Result:
    """Greedy, tabu search and a certificate; with a time limit, also branch and bound and more tabu search."""
    if isinstance(problem.W, ColumnWeights):
        return _by_columns(problem, problem.W, options, run)
    mask = _call("mies", problem, run).mask
    run.ctrl_c_stops()
    entries = problem.W.numel()
    if not run.expired() and (not run.limited or run.has_time(SECONDS_TO_DROP * entries)):
        still = torch.tensor(run.open(), device=mask.device) if run.targets else problem.k >= 0
        better = _better(problem, mask, _call("drop_greedy", problem, run).mask)
        mask = torch.where(still.unsqueeze(-1), better, mask)  # a choice that is good enough stays
    count = max(1000, 20 * problem.n) if options.iterations is None else options.iterations
    search = run.leaving(bounds.seconds_to_certify(problem, options.bound))
    first = _call("tabu", problem, search, start=mask, iterations=count)
    mask = _better(problem, mask, first.mask)
    stats = dict(first.stats)
    bound = bounds.certificate(problem, options.bound, incumbent=mask, run=run.beside_search())
    open_ = ~proved(problem, mask, objective.evaluate(problem.W, mask), bound)
    limit = torch.zeros_like(open_)
    if run.limited:
        stats |= {"nodes": 0, "strong_bounds": 0}
    if run.limited and bool(open_.any()):
        rows = open_.nonzero().squeeze(-1)
        part, told = problem.instances(rows), run.instances(rows.tolist())
        if problem.n <= LARGEST_RELAXED and run.has_time(SECONDS_PER_CUBE * problem.n**3):
            exact = _call("branch_and_bound", part, told.until(0.5), start=mask[rows])
            mask[rows] = _better(part, mask[rows], exact.mask)
            bound[rows] = torch.maximum(bound[rows], exact.lower_bound.to(bound))  # type: ignore[union-attr]
            stats |= exact.stats
        limit = ~proved(problem, mask, objective.evaluate(problem.W, mask), bound)
        if bool(limit.any()) and not run.expired():
            rows = limit.nonzero().squeeze(-1)
            part = problem.instances(rows)
            last = _call("tabu", part, run.instances(rows.tolist()), start=mask[rows])
            mask[rows] = _better(part, mask[rows], last.mask)
            stats["iterations"] += last.stats["iterations"]
    return Result(mask, bound, limit, stats, certified=options.bound)


def _by_columns(problem: Problem, W: ColumnWeights, options: PortfolioOptions, run: Run) -> Result:
    """Greedy, tabu search until the limit less the time of a certificate, and that, for W that is never formed."""
    search = run.leaving(bounds.seconds_to_certify(problem, options.bound))
    first = _call("mies", problem, search.until(0.5))  # at worst it completes its set at once
    run.ctrl_c_stops()
    mask = first.mask
    if not search.expired():
        mask = _better(problem, mask, _call("drop_greedy", problem, search.until(0.5)).mask)
    count = None if run.limited else max(1000, 20 * W.n)
    count = count if options.iterations is None else options.iterations
    found = _call("tabu", problem, search, start=mask, iterations=count)
    mask = _better(problem, mask, found.mask)
    bound = bounds.certificate(problem, options.bound, incumbent=mask, run=run.beside_search())
    open_ = ~proved(problem, mask, objective.evaluate(W, mask), bound)
    return Result(mask, bound, open_ & run.limited, found.stats, certified=options.bound)


def _call(name: str, problem: Problem, run: Run, **options: Any) -> Result:
    spec = registry.get(name)
    return spec.solve(problem, spec.make_options(options), run)


def _better(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The better of two masks per instance; the first where they are equal."""
    wins = objective.evaluate(problem.W, b) < objective.evaluate(problem.W, a)
    return torch.where(wins.unsqueeze(-1), b, a)
