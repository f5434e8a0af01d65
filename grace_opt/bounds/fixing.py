r"""Which vertices are in every optimal set, and which in none: fixing by bounds, before any search.

If every choice with vertex v costs more than a known one, v is out; if every choice without it does, v is in. The cost
of "with" and "without" is bounded by a convex relaxation (`grace_opt.bounds.qcr`), so whatever is fixed is proved. On
attention's W this decides most channels, starting with the massive ones, which cause general solvers numerical trouble.
Source: Hammer, Hansen & Simeone (1984) for persistency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import OptionError
from ..parallel import map_in_threads
from ..problem import Problem
from ..run import Run
from ..solution import OPTIMALITY_RTOL, rounding
from .incumbents import checked_incumbent, local_optimum
from .qcr import (
    LARGEST_RELAXED,
    RTOL,
    STEPS_PER_VERTEX,
    QuadraticRelaxation,
    linear_term,
    qcr_relaxation,
    seconds_to_relax,
    solve_relaxation,
)
from .subproblem import IN, OUT, Subproblem

#: Fixing makes another round only if the last one fixed at least this share of the vertices.
WORTH_ANOTHER = 0.1
#: Maximum number of rounds of fixing per kind of relaxation.
ROUNDS = 6
#: Sums of n terms are off by at most this times n·eps·Σ|terms|.
SUM_MARGIN = 8.0
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Fixing:
    """What is known of every optimal set of one instance.

    Attributes
    ----------
    inside, outside : ndarray (n,), bool
        Vertices that are in every optimal set, and vertices that are in none (protected ones included).
    objective : float
        f of the choice used in the proof.
    lower_bound : float
        Certified bound on the optimum.
    """

    inside: npt.NDArray[np.bool_]
    outside: npt.NDArray[np.bool_]
    objective: float
    lower_bound: float

    @property
    def open(self) -> npt.NDArray[np.bool_]:
        """Vertices that are not decided."""
        return ~(self.inside | self.outside)


def fixed_vertices(W: Any, k: Any = None, *, protected: Any = None, incumbent: Any = None) -> Fixing:
    r"""Find the vertices that are in every optimal set of an instance, and those that are in none.

    v is in none if :math:`\min \{f(S) : v \in S\} > f(S_0)` for a known :math:`S_0`; v is in every one if the same
    holds for the sets without v. Both minima are replaced by lower bounds.

    Parameters
    ----------
    W : array_like (n, n), scipy.sparse matrix, networkx graph, or Problem
        One instance.
    k : int, optional
        Number of vertices to choose; leave out when W is a `Problem`.
    protected : array_like, optional
        As in `grace_opt.solve`.
    incumbent : bool mask (n,), optional
        A known choice, such as the ``mask`` of a solution: the better it is, the more is fixed. Default: a local
        optimum by greedy and exchanges.

    Returns
    -------
    Fixing

    Raises
    ------
    ProblemError
        As in `grace_opt.solve`.
    OptionError
        For a batch: call it once per instance.

    Notes
    -----
    O(n³) for the shift and O(n²) to O(n³) per vertex probed. Rounding is covered: the result holds in exact
    arithmetic.

    References
    ----------
    Hammer, Hansen & Simeone, Math. Program. 28 (1984).

    Examples
    --------
    >>> known = fixed_vertices([[1.0, 0.1, 0.1], [0.1, 2.0, 0.1], [0.1, 0.1, 9.0]], 2)
    >>> known.inside.tolist(), known.outside.tolist()
    ([True, True, False], [False, False, True])
    """
    if isinstance(W, Problem) and (k is not None or protected is not None):
        raise OptionError("W is a Problem, which holds k and protected already: leave k= and protected= out.")
    problem = W if isinstance(W, Problem) else Problem.of(W, k, protected=protected)
    if problem.batch_shape:
        raise OptionError(f"W is a batch of shape {problem.batch_shape}: call fixed_vertices once per instance.")
    problem = problem.as_matrix("fixed_vertices")
    known = local_optimum(problem.flatten())[0] if incumbent is None else checked_incumbent(problem, incumbent)
    mask = known.cpu().numpy()
    W64 = problem.W.detach().to("cpu").double().numpy()
    objective = math.fsum(W64[np.ix_(mask, mask)].ravel().tolist())
    sub, scale = Subproblem.of(problem, mask)
    inside, outside = np.zeros(problem.n, bool), ~problem.candidates.cpu().numpy()
    if sub is None:  # weights too far apart for a relaxation
        return Fixing(inside, outside, objective, -math.inf)
    # Keep ties: rule out only what clearly costs more than the known choice.
    tie = (OPTIMALITY_RTOL * abs(objective) + float(rounding(problem, torch.from_numpy(mask)))) / scale
    ((left, bound),) = map_in_threads(lambda part: reduce_by_fixing(part, objective / scale, -tie), [sub])
    inside[left.chosen] = True
    inside[left.vertices] |= left.k == left.m
    possible = inside.copy()
    possible[left.vertices] |= left.k > 0
    outside |= ~possible
    return Fixing(inside, outside, objective, min(bound * scale, objective))


def reduce_by_fixing(
    sub: Subproblem,
    incumbent: float,
    slack: float,
    run: Run | None = None,
    *,
    first: QuadraticRelaxation | None = None,
    shifts: int = ROUNDS,
    largest_shifted: int = LARGEST_RELAXED,
    largest_probed: int = LARGEST_RELAXED,
) -> tuple[Subproblem, float]:
    """Fix vertices of a subproblem: returns what is left, and a lower bound on everything, kept or ruled out.

    Parameters
    ----------
    sub : Subproblem
    incumbent : float
        Objective of a known choice.
    slack : float
        Choices that cost ``incumbent - slack`` or more may be lost; a negative slack keeps choices up to that cost.
    run : Run, optional
        Fixing stops when its time is up.
    first : QuadraticRelaxation, optional
        The plain relaxation of `sub`, if known.
    shifts : int
        Maximum number of rounds with `qcr_relaxation`, after the plain relaxation fixes no more.
    largest_shifted : int
        With more vertices than this, `qcr_relaxation` is skipped.
    largest_probed : int
        With more vertices than this, only reduced costs are used, O(m²), and no vertex is probed, O(m³).

    Returns
    -------
    sub : Subproblem
        The rest; meaningless if `bound` is the cutoff.
    bound : float
        At most the cutoff ``incumbent - slack``; equal to it if no choice is below the cutoff.
    """
    cutoff, bound, plain = incumbent - slack, -math.inf if first is None else first.bound, first
    for tight, rounds in ((False, ROUNDS), (True, shifts)):
        for _ in range(rounds):
            if tight and sub.m > largest_shifted:
                break
            if sub.decided or (run is not None and not run.has_time(seconds_to_relax(sub.m))):
                return sub, min(cutoff, max(bound, value_if_decided(sub)))
            if tight:
                relaxation, plain = qcr_relaxation(sub, incumbent, plain=plain, run=run), None
            else:
                relaxation = plain = solve_relaxation(sub, run=run) if plain is None else plain
            bound = max(bound, relaxation.bound)
            if bound >= cutoff:
                return sub, cutoff
            verdict = by_reduced_costs(sub, relaxation, cutoff)
            if np.count_nonzero(verdict) < WORTH_ANOTHER * sub.m and sub.m <= largest_probed:
                verdict = np.maximum(verdict, probed(sub, relaxation, cutoff, run))
            if not verdict.any():
                break
            few = np.count_nonzero(verdict) < WORTH_ANOTHER * sub.m
            sub, plain = sub.fixed(verdict), None
            if not 0 <= sub.k <= sub.m:
                return sub, cutoff
            if few:
                break
    return sub, min(cutoff, max(bound, value_if_decided(sub)))


def by_reduced_costs(sub: Subproblem, relaxation: QuadraticRelaxation, cutoff: float) -> npt.NDArray[np.int8]:
    """Decide vertices by the tangent plane at the relaxation's solution: 1 = in, 2 = out, 0 = open, below `cutoff`.

    The minimum of the plane over all choices takes the k smallest entries of the gradient. Taking another vertex for
    the last of them, or the next vertex for one of them, raises it by the difference.
    """
    c, k, x = linear_term(sub, relaxation.A, relaxation.F), sub.k, relaxation.x
    Ax = relaxation.A @ x
    gradient = c + 2.0 * Ax
    order = np.argsort(gradient, kind="stable")
    last, following = gradient[order[k - 1]], gradient[order[k]]
    plane = float(gradient[order[:k]].sum() - x @ Ax)
    target = cutoff - sub.constant - relaxation.pairs + relaxation.rounding
    verdict = np.zeros(sub.m, np.int8)
    verdict[order[k:]] = np.where(plane + (gradient[order[k:]] - last) >= target, OUT, 0)
    verdict[order[:k]] = np.where(plane + (following - gradient[order[:k]]) >= target, IN, 0)
    return verdict


def probed(
    sub: Subproblem, relaxation: QuadraticRelaxation, cutoff: float, run: Run | None = None
) -> npt.NDArray[np.int8]:
    """Decide vertices by probing each one: 1 = in, 2 = out, 0 = open, for all choices below `cutoff`."""
    from ..kernels.solve.relaxation.cpu import probe

    verdict = np.zeros(sub.m, np.int8)
    target = cutoff - sub.constant - relaxation.pairs + relaxation.rounding
    c = linear_term(sub, relaxation.A, relaxation.F)
    slice_ = max(1, 4_000_000 // (sub.m * sub.m))
    for first in range(0, sub.m, slice_):
        if run is not None and run.expired():
            break
        last = min(sub.m, first + slice_)
        steps = STEPS_PER_VERTEX * sub.m
        probe(relaxation.A, c, sub.k, relaxation.x, target, 10 * RTOL, steps, verdict, first, last)
    return verdict


def value_if_decided(sub: Subproblem) -> float:
    """The objective, less its rounding error, if nothing is left to decide; else -inf."""
    if not sub.decided:
        return -math.inf
    value, size = sub.constant, sub.constant_size
    if sub.k:
        value += float(sub.linear.sum() + sub.W.sum())
        size += float(sub.linear_size.sum() + np.abs(sub.W).sum())
    return value - SUM_MARGIN * (len(sub.chosen) + sub.m) * _EPS * size
