r"""Tighter certified bounds, one instance per thread: QCR by coordinate ascent, DNN + RLT, and both after fixing.

* `plain_bound`: the convex relaxation with a diagonal shift that is a multiple of the node weights or row sums, or
  constant.
* `qcr_bound`: the convex relaxation with the best diagonal that coordinate ascent finds.
* `dnn_bound`: also uses products of pairs; as strong as a semidefinite solver, for about 100 eigenvalue problems.
* `fast_bound` and `tight_bound`: what `grace_opt.bounds.certificate` computes. First they fix the vertices that a known
  choice rules in or out, which settles most of attention's W. Then they use the bounds above as far as needed;
  `fast_bound` uses only those that are cheap.

Every value is a valid bound however far the iterations got (`grace_opt.bounds.qcr` explains why, with the margins for
rounding). Sources: see `grace_opt.bounds.qcr` and `grace_opt.bounds.dnn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import SolverError
from ..parallel import map_in_threads
from ..problem import Problem
from ..run import Run
from ..solution import STEP_MARGIN
from .batched import LARGEST_EIGEN, continuous_bound, eigenvalue_bound, row_bound
from .convexity import is_semidefinite, made_convex, semidefinite_bound, start_diagonals
from .dnn import dnn_relaxation, seconds_per_dnn_step
from .fixing import reduce_by_fixing
from .incumbents import checked_incumbent
from .of_batch import of_batch
from .qcr import LARGEST_RELAXED, qcr_relaxation, seconds_to_relax, solve_relaxation, with_diagonal
from .subproblem import Array, Subproblem

#: Fixing may lose choices within this relative distance of the known one; the bound is then that much below it.
FIXING_RTOL = 1e-10
_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Effort:
    """How far a bound goes; chosen on attention's W, for some 5 and 20 milliseconds per instance of 64 vertices.

    Attributes
    ----------
    shifted, probed, paired : int
        Largest number of vertices for which the best diagonal is computed, all vertices are probed, and products of
        pairs are used.
    gap_left : float
        Products of pairs are not tried once the relative gap to the known choice is at most this.
    steps : int
        Number of steps of the method of multipliers.
    """

    shifted: int
    probed: int
    paired: int
    gap_left: float
    steps: int


FAST = Effort(shifted=128, probed=160, paired=48, gap_left=0.01, steps=20)
TIGHT = Effort(shifted=LARGEST_RELAXED, probed=LARGEST_RELAXED, paired=LARGEST_RELAXED, gap_left=0.01, steps=60)


@of_batch
def plain_bound(problem: Problem) -> Tensor:
    """Lower bound from the plain convex relaxation, solved to the end, with the best of four simple diagonals.

    Parameters and return value as in `qcr_bound`; any n.

    Notes
    -----
    O(n³) for the shift (one factorisation for a few hundred vertices or more), O(n) per pairwise step. With all four
    diagonals it is at least `continuous_bound` and `eigenvalue_bound`, up to a relative 1e-6. Where weights are so far
    apart that no scale suits them all, it is the best of these two and `row_bound`, and so are the bounds below.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[2.0, 1.0], [1.0, 2.0]]), 1).flatten()
    >>> round(float(plain_bound(p)), 6)
    2.0
    """
    problem = problem.as_matrix("plain_bound")
    return bound_each(problem, None, lambda sub, value: _best_plain(sub))


@of_batch
def qcr_bound(problem: Problem) -> Tensor:
    r"""Lower bound from the best diagonal shift that coordinate ascent finds (QCR-CD).

    .. math:: \max_d \min_x \{x^\top (W - \mathrm{Diag}\, d) x + d^\top x\}

    Parameters
    ----------
    problem : Problem
        A flattened batch.

    Returns
    -------
    Tensor, shape (B,), float64

    Raises
    ------
    SolverError
        If n is larger than 2000.

    Notes
    -----
    O(n³) per sweep, about 100 sweeps. References: Billionnet, Elloumi & Plateau, Discrete Appl. Math. 157 (2009).

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 2.0]]), 2).flatten()
    >>> round(float(qcr_bound(p)), 4)  # the optimum is 4
    4.0
    """
    problem = _small_matrix(problem, "qcr_bound")
    return bound_each(problem, None, lambda sub, value: max(_best_plain(sub), qcr_relaxation(sub, value).bound))


@of_batch
def dnn_bound(problem: Problem) -> Tensor:
    """Lower bound from the doubly nonnegative relaxation with products of pairs (DNN + RLT), by a first-order method.

    Parameters, return value and errors as in `qcr_bound`.

    Notes
    -----
    150 symmetric eigenvalue problems of size n per instance. References: Burer, Math. Program. Comput. 2 (2010).

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[2.0, -1.0, 0.0], [-1.0, 2.0, 1.0], [0.0, 1.0, 2.0]]), 2).flatten()
    >>> bool(1.99 < dnn_bound(p) <= 2)  # the optimum is 2
    True
    """
    problem = _small_matrix(problem, "dnn_bound")
    return bound_each(problem, None, lambda sub, value: dnn_relaxation(sub, value)[0].bound)


@of_batch
def tight_bound(problem: Problem, incumbent: Any = None, run: Run | None = None) -> Tensor:
    """Lower bound after fixing what a known choice rules out, by QCR-CD and, if a gap is left, DNN + RLT.

    Parameters
    ----------
    problem : Problem
        A flattened batch of any n; above 2000 vertices, bounds that repeat steps of O(n³) many times are skipped.
    incumbent : Tensor (B, n), bool, optional
        A known choice per instance, such as the answer of a search. Default: greedy and exchanges. If fixing leaves
        nothing better than this choice, the bound is its objective, to 1e-10.
    run : Run, optional
        Bounds that do not fit into its time are skipped.

    Returns
    -------
    Tensor, shape (B,), float64

    Notes
    -----
    A few milliseconds per instance on attention's W of 64 channels; as `dnn_bound` at worst. Never below `fast_bound`,
    but perhaps below `row_bound`: `grace_opt.bounds.certificate` takes the best of them.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]]), 2).flatten()
    >>> round(float(tight_bound(p)), 6)  # the optimum is 5
    5.0
    """
    problem = problem.as_matrix("tight_bound")
    return bound_each(problem, incumbent, lambda sub, value: _after_fixing(sub, value, (FAST, TIGHT), run), run)


@of_batch
def fast_bound(problem: Problem, incumbent: Any = None, run: Run | None = None) -> Tensor:
    """`tight_bound`, but repeating steps of O(n³) many times only if fixing leaves about 100 vertices or fewer.

    Parameters and return value as in `tight_bound`.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]]), 2).flatten()
    >>> round(float(fast_bound(p)), 6)  # the optimum is 5
    5.0
    """
    problem = problem.as_matrix("fast_bound")
    return bound_each(problem, incumbent, lambda sub, value: _after_fixing(sub, value, (FAST,), run), run)


def bound_each(
    problem: Problem, incumbent: Any, bound: Callable[[Subproblem, float], float], run: Run | None = None
) -> Tensor:
    """`bound(sub, value)` for every instance, in W's units and raised to whole steps; f if nothing is left to decide.

    Parameters
    ----------
    problem : Problem
        A flattened batch.
    incumbent : Tensor (B, n), bool, or None
        A known choice per instance; `value` is its objective.
    bound : callable
        Called with the candidates' part of W, scaled, if there is something to decide; a result above `value` is cut
        to it.
    run : Run, optional
        Bounds of weights that no scale suits are skipped if they do not fit into its time.

    Returns
    -------
    Tensor, shape (B,), float64
    """
    masks = checked_incumbent(problem, incumbent)
    values = problem.weights.objective(masks).tolist()

    def one(b: int) -> float:
        instance = problem.instance(b)
        sub, scale = Subproblem.of(instance, masks[b].cpu().numpy())
        if sub is None:
            return min(float(values[b]), _without_scale(instance.flatten(), run))
        if sub.decided:
            return float(values[b])
        value = float(values[b]) / scale
        found = min(value, bound(sub, value))
        step = float(instance.step) / scale
        if step and math.isfinite(found):  # round up to the next multiple, allowing for rounding of the quotient
            steps = found / step
            found = max(found, min(value, step * math.ceil(steps - STEP_MARGIN - 4.0 * _EPS * abs(steps))))
        return float(found * scale)

    return torch.tensor(map_in_threads(one, range(len(values))), dtype=torch.float64, device=problem.W.device)


def _without_scale(problem: Problem, run: Run | None) -> float:
    """The best bound of one instance by functions that need no scale, or whose margins cover the weights it loses."""
    bounds = [row_bound]
    if run is None or (problem.n <= LARGEST_EIGEN and run.has_time(2 * seconds_to_relax(problem.n))):
        bounds += [eigenvalue_bound, continuous_bound]
    found = [float(bound(problem)) for bound in bounds]
    return max((one for one in found if math.isfinite(one)), default=-math.inf)  # else sums are beyond float64


def _after_fixing(sub: Subproblem, value: float, efforts: Sequence[Effort], run: Run | None) -> float:
    """The bound of one instance: fixing, the other simple diagonals, pairs if a gap is left; until `value` is proved.

    A later effort repeats only what it does further than the one before.
    """
    run = Run() if run is None else run
    has_time, slack = partial(run.has_time, seconds_to_relax(sub.m)), FIXING_RTOL * abs(value)
    if not has_time():
        return -math.inf
    first, *others = sorted(start_diagonals(sub, sub.W, has_time), key=lambda a: float(a.sum()))
    plain = solve_relaxation(sub, with_diagonal(sub.W, first), run=run)
    left, best, reached = sub, -math.inf, -1
    for effort in efforts:
        if sub.m > reached:  # else the last effort fixed as much
            left, bound = reduce_by_fixing(
                sub,
                value,
                slack,
                run,
                first=plain,
                shifts=1,
                largest_shifted=effort.shifted,
                largest_probed=effort.probed,
            )
            best = max(best, bound)
        if reached < 0 and best < value - slack:
            best = max(best, _others(sub, first, others, run))
        wanted = best < value - effort.gap_left * abs(value) and 0 < left.k < left.m <= effort.paired
        if wanted and run.has_time(seconds_per_dnn_step(left.m)):
            best = max(best, dnn_relaxation(left, value, steps=effort.steps, run=run)[0].bound)
        if best >= value - slack:
            break
        reached = min(effort.shifted, effort.probed)
    return min(best, value)


def _best_plain(sub: Subproblem) -> float:
    first, *others = sorted(start_diagonals(sub, sub.W), key=lambda a: float(a.sum()))
    return max(solve_relaxation(sub, with_diagonal(sub.W, first)).bound, _others(sub, first, others, Run()))


def _others(sub: Subproblem, first: Array, others: list[Array], run: Run) -> float:
    """The best plain relaxation with one of the other diagonals and, unless W is semidefinite, the constant ones.

    And `semidefinite_bound`, which a relaxation exceeds only where it is solved well: not where W nearly cancels.
    """
    seconds = seconds_to_relax(sub.m)
    best = semidefinite_bound(sub) if run.has_time(seconds) else -math.inf
    for a in others:
        if run.has_time(seconds):
            best = max(best, solve_relaxation(sub, with_diagonal(sub.W, a), run=run).bound)
    if sub.W.any() and not is_semidefinite(sub, first):
        # Where a node weight is negative, `continuous_bound` keeps them all in the matrix: so does the second.
        for kept in (np.zeros(sub.m), sub.linear)[: 1 + bool((sub.linear <= 0).any())]:
            if run.has_time(seconds):
                a = made_convex(sub.W, kept, np.ones(sub.m))
                best = max(best, solve_relaxation(sub, with_diagonal(sub.W, a), run=run).bound)
    return best


def _small_matrix(problem: Problem, name: str) -> Problem:
    if problem.n > LARGEST_RELAXED:
        raise SolverError(
            f"n = {problem.n} is beyond {LARGEST_RELAXED}, for which {name} takes O(n³) time many times over: use "
            "certify='fast' or grace_opt.bounds.fast_bound, which take it once."
        )
    return problem.as_matrix(name)
