r"""Exhaustive enumeration of all k-subsets: the oracle, exact, for small instances.

Maths: subsets are visited in revolving-door order: each differs from the one before by one exchange. So f and the row
sums :math:`s = W 1_S` are updated in O(n) per subset, with a bound on the rounding error accumulated so far. A subset
that may be better than the best one, given these bounds, is summed again with the rounding error of every addition kept
(pairs of float64, about 32 digits), and compared by that sum. If it is not better, f and s are recomputed, so that a
large weight that has left leaves no rounding error behind. Vertices with large weights come last, where the order
exchanges least. Under constraints, subsets that break one are passed over, and the others summed in pairs.

Complexity O(n C(n, k)) time, O(n²) memory; under constraints, O(k²) per subset that keeps them. Guarantee: optimal, to
the 32 digits of the sums. Good up to C(n, k) of about 10⁸; beyond, it refuses at once. References: Knuth, TAOCP 4A,
7.2.1.3, Algorithm R; Payne & Ives (1979); Ogita, Rump & Oishi, SIAM J. Sci. Comput. 26 (2005) for the sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grace_opt import registry
from grace_opt._util.arrays import power_of_two_scale
from grace_opt.errors import InfeasibleConstraintsError, SolverError
from grace_opt.problem import Constraints, Problem
from grace_opt.problem.constraints import UndecidedError, find_choice
from grace_opt.registry import check_fields, integer, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult

#: Subsets times n between two looks at the clock.
WORK_BETWEEN_CLOCK_CHECKS = 1 << 26
#: Error of sums in pairs, relative to the sum of the absolute weights.
PAIR_SUM_ERROR = 2.0**-96


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
        check_fields(self, integer, "max_subsets", at_least=1)


@register_solver(
    "exhaustive",
    options=ExhaustiveOptions,
    exact=True,
    batched=True,
    guarantee="optimal",
    compiled=True,
    searches=True,
    constraints=True,
)
def exhaustive(problem: Problem, options: ExhaustiveOptions, run: Run) -> SolverResult:
    """Visit every k-subset and keep the best; proves optimality, but only for small C(n, k)."""
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
        if b and run.expired():  # even one slice each would take too long for thousands of instances
            mies, limit[b:] = registry.get("mies"), True
            rest = problem.instances(torch.arange(b, len(mask), device=mask.device))
            mask[b:] = mies.solve(rest, mies.make_options({}), run.instances(range(b, len(mask)))).mask
            break
        vertices = candidates.nonzero().squeeze(-1)
        W = problem.W[b][vertices][:, vertices].to("cpu", torch.float64).contiguous().numpy()
        its = run.instance(b)
        its.begin()
        if problem.constraints is None:
            chosen, seen, finished = _search(W, k[b], its)
        else:
            chosen, seen, finished = _search_within(W, problem.constraints, k[b], vertices, its)
        mask[b, vertices[torch.from_numpy(chosen).to(vertices.device)]] = True
        limit[b] = not finished
        visited += seen
    least = [_least(W[m][:, m].flatten().double().cpu().numpy()) for W, m in zip(problem.W, mask, strict=True)]
    bound = torch.where(limit, -torch.inf, torch.tensor(least, dtype=torch.float64, device=limit.device))
    return SolverResult(mask, lower_bound=bound, limit=limit, stats={"subsets": visited})


def _search_within(
    W: np.ndarray[Any, Any], rows: Constraints, k: int, vertices: Tensor, run: Run
) -> tuple[np.ndarray[Any, Any], int, bool]:
    """The same under constraints; if stopped early, the best subset may be one that only keeps them.

    Raises
    ------
    InfeasibleConstraintsError, SolverError
        If no subset keeps them, or none was found in time.
    """
    from grace_opt.kernels.solve.constrained.cpu.enumeration import advance

    n, order = W.shape[0], vertices.cpu().numpy()
    kept = rows.integers.restricted(np.empty(0, np.int64), order)
    by_vertex = np.ascontiguousarray(kept.A.T), kept.lower, kept.upper, np.ascontiguousarray(kept.limbs.T), kept.limit
    best, best_value, finished = np.full(k, -1), np.array([np.inf, 0.0]), k in (0, n)
    c, visited = np.append(np.arange(k), n), int(finished)
    try:
        candidates = torch.zeros(rows.n, dtype=torch.bool, device="cpu")
        candidates[vertices.cpu()] = True
        known = find_choice(rows, k, candidates)
    except UndecidedError:  # costs within rounding of the budget: here, they are compared exactly
        if finished and not rows.broken(set(order[:k].tolist())):
            best = np.arange(k)
    else:
        if known is None:
            raise InfeasibleConstraintsError("no choice keeps all constraints: drop or relax one.")
        best = np.flatnonzero(known.numpy()[order])
        entries = W[np.ix_(best, best)].ravel().tolist()
        best_value[0] = math.fsum(entries)
        best_value[1] = math.fsum([*entries, -best_value[0]])
    while not finished:
        seen, finished = advance(W, c, best, best_value, max(1, WORK_BETWEEN_CLOCK_CHECKS // n), *by_vertex)
        visited += seen
        run.note([float(best_value[0])])
        if not finished and run.expired():
            break
    if (best < 0).any():
        if finished:
            raise InfeasibleConstraintsError("no choice keeps all constraints: drop or relax one.")
        raise SolverError("no choice that keeps all constraints was found in time: give more time_limit=.")
    return best, visited, finished


def _least(chosen: np.ndarray[Any, Any]) -> float:
    """Return f of a set less the error of sums: sets that differ by less may have been treated as equal.

    Rounded once, as f itself may lie so near to the middle of two numbers that the next one is below it; and of numbers
    near one, as the error of the smallest ones would be zero.
    """
    scale = power_of_two_scale(chosen)
    numbers = (chosen / scale).tolist()
    return math.fsum([*numbers, -PAIR_SUM_ERROR * math.fsum(map(abs, numbers))]) * scale


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
    """Best subset of one instance, number of subsets visited, and whether all were."""
    n = W.shape[0]
    if k in (0, n):
        return np.arange(k), 1, True
    from grace_opt.kernels.solve.enumeration.cpu import advance  # importing numba takes a while

    order = np.argsort(np.abs(W).max(1), kind="stable")
    W = np.ascontiguousarray(W[np.ix_(order, order)])
    c = np.append(np.arange(k), n)  # current subset, ascending, and Knuth's sentinel
    best, best_value, visited, finished = c[:k].copy(), np.array([np.inf, 0.0]), 0, False
    while not finished:
        seen, finished = advance(W, c, best, best_value, max(1, WORK_BETWEEN_CLOCK_CHECKS // n))
        visited += seen
        run.note([float(best_value[0])])
        if not finished and run.expired():
            break
    return order[best], visited, finished
