r"""Exhaustive enumeration of all k-subsets: the oracle, exact, for small instances.

Maths: subsets are visited in revolving-door order, in which neighbours differ by one exchange, so f and the row sums
:math:`s = W 1_S` follow in O(n) per subset. Both are computed afresh every `REFRESH` subsets, which keeps the drift
below ``REFRESH · 8 eps · Σ|W|``; the optimum found is evaluated again in float64. Complexity O(n C(n, k)) time, O(n²)
memory. Guarantee: optimal, to that rounding. Good up to C(n, k) of about 10⁸; beyond, it refuses at once. Reference:
Knuth, TAOCP 4A,
7.2.1.3, Algorithm R; Payne & Ives (1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from grace_opt import objective, registry
from grace_opt.errors import OptionError, SolverError
from grace_opt.problem import Problem
from grace_opt.registry import Run, register
from grace_opt.solution import Result

#: Subsets between two fresh evaluations; subsets times n between two looks at the clock.
REFRESH = 1024
SLICE = 1 << 26


@dataclass(frozen=True)
class ExhaustiveOptions:
    """Options of `exhaustive`.

    Attributes
    ----------
    max_subsets : int
        Refuse an instance with more subsets than this.
    """

    max_subsets: int = 200_000_000

    def __post_init__(self) -> None:
        if isinstance(self.max_subsets, bool) or not isinstance(self.max_subsets, int) or self.max_subsets < 1:
            raise OptionError(f"max_subsets={self.max_subsets!r}: give a positive integer.")


@register("exhaustive", options=ExhaustiveOptions, exact=True, batched=True, guarantee="optimal")
def exhaustive(problem: Problem, options: ExhaustiveOptions, run: Run) -> Result:
    """Visit every k-subset and keep the best; proves optimality, for small C(n, k) only."""
    free, k = problem.candidates.sum(-1).tolist(), problem.k.tolist()
    counts = [math.comb(m, c) for m, c in zip(free, k, strict=True)]
    if (most := max(counts)) > options.max_subsets:
        b = counts.index(most)
        raise SolverError(_refusal(free[b], k[b], most, options.max_subsets))
    mask = torch.zeros_like(problem.candidates)
    limit = torch.zeros_like(problem.k, dtype=torch.bool)
    visited = 0
    run.ctrl_c_stops()
    for b, candidates in enumerate(problem.candidates):
        if b and run.expired():  # no slice for each of what may be thousands
            mies, limit[b:] = registry.get("mies"), True
            rest = problem.instances(torch.arange(b, len(mask), device=mask.device))
            mask[b:] = mies.solve(rest, mies.make_options({}), run).mask
            break
        vertices = candidates.nonzero().squeeze(-1)
        W = problem.W[b][vertices][:, vertices].to("cpu", torch.float64).contiguous().numpy()
        chosen, seen, finished = _search(W, k[b], run)
        mask[b, vertices[torch.from_numpy(chosen).to(vertices.device)]] = True
        limit[b] = not finished
        visited += seen
    bound = torch.where(limit, -torch.inf, objective.evaluate(problem.W, mask))
    return Result(mask, lower_bound=bound, limit=limit, stats={"subsets": visited})


def _refusal(n: int, k: int, count: int, allowed: int) -> str:
    others = [s.name for s in registry.specs().values() if s.exact and s.name != "exhaustive"]
    instead = (
        f"method={others[0]!r} proves optimality without enumeration"
        if others
        else "there is no other exact method yet; method='local_search' with certify=True gives a certified gap"
    )
    # Beyond 1e300 floats overflow, but logarithms of integers do not.
    size = f"= {count:.6g}" if count < 10**300 else f"= about 10^{math.log10(count):.0f}"
    return f"C({n}, {k}) {size} subsets are more than max_subsets = {allowed:.6g}: {instead}."


def _search(W: np.ndarray[Any, Any], k: int, run: Run) -> tuple[np.ndarray[Any, Any], int, bool]:
    """Best subset of one instance, subsets visited, and whether all were."""
    n = W.shape[0]
    if k in (0, n):
        return np.arange(k), 1, True
    advance = _kernel()
    c = np.append(np.arange(k), n)  # current subset, ascending, and Knuth's sentinel
    best, best_value, visited, finished = c[:k].copy(), np.array([np.inf]), 0, False
    slice_ = max(1, SLICE // (n * REFRESH)) * REFRESH  # whole stretches between fresh sums: the same rounding
    while not finished:
        seen, finished = advance(W, c, best, best_value, slice_, REFRESH)
        visited += seen
        if not finished and run.expired():
            break
    return best, visited, finished


@cache
def _kernel() -> Callable[..., tuple[int, bool]]:
    """The compiled loop; numba is imported on first use, since it takes a while."""
    from grace_opt.kernels.compiled._jit import jit

    compiled: Callable[..., tuple[int, bool]] = jit(_advance)
    return compiled


def _advance(
    W: np.ndarray[Any, Any],
    c: np.ndarray[Any, Any],
    best: np.ndarray[Any, Any],
    best_value: np.ndarray[Any, Any],
    budget: int,
    refresh: int,
) -> tuple[int, bool]:
    """Visit up to `budget` subsets from `c` on (in place); returns how many, and whether they were the last ones."""
    n, k = W.shape[0], c.shape[0] - 1
    sums = np.zeros(n)
    value = 0.0
    for seen in range(budget):
        if seen % refresh == 0:
            sums[:] = 0.0
            for a in range(k):
                sums += W[c[a]]
            value = 0.0
            for a in range(k):
                value += sums[c[a]]
        if value < best_value[0]:
            best_value[0] = value
            best[:] = c[:k]
        # Algorithm R with 0-based positions: find the exchange, `out` for `new`.
        out, new = -1, -1
        j = 1
        decrease = True
        if k % 2 == 1:
            if c[0] + 1 < c[1]:
                out, new = c[0], c[0] + 1
                c[0] = new
        elif c[0] > 0:
            out, new = c[0], c[0] - 1
            c[0] = new
        else:
            decrease = False
        while new < 0 and j < k:
            if decrease:
                if c[j] >= j + 1:
                    out, new = c[j], j - 1
                    c[j] = c[j - 1]
                    c[j - 1] = new
                    break
                j += 1
            else:
                if c[j] + 1 < c[j + 1]:
                    out, new = c[j - 1], c[j] + 1
                    c[j - 1] = c[j]
                    c[j] = new
                    break
                j += 1
            decrease = not decrease
        if new < 0:
            return seen + 1, True
        value += W[out, out] - 2.0 * sums[out] + W[new, new] + 2.0 * (sums[new] - W[out, new])
        sums += W[new] - W[out]
    return budget, False
