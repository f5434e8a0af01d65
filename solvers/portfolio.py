r"""Portfolio: the best answer within the time there is, with a certificate. What to use when in doubt.

Without a time limit: both greedies, tabu search from the better one, and the fast certificate. With one: the same, then
branch and bound for half of the time that is left (it ends early if it proves the optimum), then tabu search again
until the limit; beyond 2000 vertices tabu search all the time. What does not fit into the time that is left is not
begun, `drop_greedy` and the bound of large W included. Complexity: that of its parts; guarantee: never worse than
`mies`, and, given the time, than `drop_greedy` or a local optimum of exchanges, and with a bound. Reference: Huberman,
Lukose & Hogg, Science 275 (1997), for portfolios.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grace_opt import bounds, objective, registry
from grace_opt.bounds.qcr import LARGEST_RELAXED, SECONDS_PER_CUBE
from grace_opt.errors import OptionError
from grace_opt.problem import Problem
from grace_opt.registry import register
from grace_opt.run import Run
from grace_opt.solution import Result, proved

#: What `drop_greedy` takes per entry of W, roughly; and by how much the tight bound takes longer than the fast one.
SECONDS_TO_DROP, TIGHT_FACTOR = 2e-8, 100


@dataclass(frozen=True)
class PortfolioOptions:
    """Options of `portfolio`.

    Attributes
    ----------
    iterations : int or None
        Exchanges per instance of the first tabu search; None: 20 n, at least 1000.
    bound : {"fast", "tight"}
        How the bound that comes with the answer is computed.
    """

    iterations: int | None = None
    bound: str = "fast"

    def __post_init__(self) -> None:
        whole = isinstance(self.iterations, int) and not isinstance(self.iterations, bool)
        if self.iterations is not None and not (whole and self.iterations >= 0):
            raise OptionError(f"iterations={self.iterations!r}: give a non-negative integer, or None.")
        if self.bound not in bounds.LEVELS:
            raise OptionError(f"bound={self.bound!r}: give one of {', '.join(map(repr, bounds.LEVELS))}.")


@register(
    "portfolio",
    options=PortfolioOptions,
    batched=True,
    guarantee="never worse than mies and drop_greedy",
    compiled=True,
)
def portfolio(problem: Problem, options: PortfolioOptions, run: Run) -> Result:
    """Greedies, tabu search and a certificate; with a time limit, branch and bound and more tabu search."""
    mask = _call("mies", problem, run).mask
    run.ctrl_c_stops()
    entries = problem.W.numel()
    if not run.limited or run.has_time(SECONDS_TO_DROP * entries):
        mask = _better(problem, mask, _call("drop_greedy", problem, run).mask)
    # Before the searches, which know how to stop: a bound takes what it takes, and is left out where that is too long.
    bound = bounds.row_bound_in_time(problem, run)
    seconds = SECONDS_PER_CUBE * problem.n * entries * (TIGHT_FACTOR if options.bound == "tight" else 1)
    if problem.n <= bounds.MOST_FAST and run.has_time(seconds):
        # The plain relaxation, compiled as all else here is, is what the fast certificate computes in torch.
        better = bounds.plain_bound if options.bound == "fast" else bounds.tight_bound
        bound = torch.maximum(bound, better(problem))
    count = max(1000, 20 * problem.n) if options.iterations is None else options.iterations
    first = _call("tabu", problem, run, start=mask, iterations=count)
    mask = _better(problem, mask, first.mask)
    stats = dict(first.stats)
    limit = torch.zeros_like(problem.k, dtype=torch.bool)
    if run.limited:
        if problem.n <= LARGEST_RELAXED and run.has_time(SECONDS_PER_CUBE * problem.n**3):
            exact = _call("branch_and_bound", problem, run.until(0.5), start=mask)
            mask = _better(problem, mask, exact.mask)
            bound = torch.maximum(bound, exact.lower_bound.to(bound))  # type: ignore[union-attr]
            stats |= exact.stats
        limit = ~proved(problem, mask, objective.evaluate(problem.W, mask), bound)
        if bool(limit.any()) and not run.expired():
            open_ = limit.nonzero().squeeze(-1)
            last = _call("tabu", problem.instances(open_), run.renumbered(open_.tolist()), start=mask[open_])
            mask[open_] = _better(problem.instances(open_), mask[open_], last.mask)
            stats["iterations"] += last.stats["iterations"]
    return Result(mask, bound, limit, stats)


def _call(name: str, problem: Problem, run: Run, **options: Any) -> Result:
    spec = registry.get(name)
    return spec.solve(problem, spec.make_options(options), run)


def _better(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The better of two masks per instance; the first where they are equal."""
    wins = objective.evaluate(problem.W, b) < objective.evaluate(problem.W, a)
    return torch.where(wins.unsqueeze(-1), b, a)
