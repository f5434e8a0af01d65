r"""Which vertices are in every optimal set, and which in none: fixing by bounds, before any search.

If every choice with vertex v costs more than a known one, v is out; if every choice without it does, v is in. The lower
bound of "with" and "without" is a convex relaxation (`grace_opt.bounds.qcr`), so what is fixed is proved. On
attention's W this decides most channels, the massive ones first, whose range of weights general solvers stumble over.
Sources: Hammer, Hansen & Simeone (1984) for persistency; ours for the relaxations used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import registry
from ..errors import OptionError
from ..parallel import map_in_threads
from ..problem import Problem
from ..run import Run, checked_seed
from ..solution import OPTIMALITY_RTOL, rounding
from .qcr import RTOL, SECONDS, STEPS_PER_VERTEX, Relaxation, linear_term, relax, shifted
from .subproblem import Subproblem

#: Probing stops refining where fewer than this share of the vertices was fixed by a round.
WORTH_ANOTHER = 0.1
#: Rounds of fixing per kind of relaxation.
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
        f of the choice that it was proved with.
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


def fixed_vertices(W: Any, k: Any = None, *, protected: Any = None, seed: int = 0) -> Fixing:
    r"""Vertices that are in every optimal set of an instance, and in none.

    v is in none if :math:`\min \{f(S) : v \in S\} > f(S_0)` for a known :math:`S_0`, found by `tabu`; in every one if
    the same holds for the sets without v. Both minima are replaced by lower bounds.

    Parameters
    ----------
    W : array_like (n, n), scipy.sparse matrix, networkx graph, or Problem
        One instance.
    k : int, optional
        How many vertices are chosen; leave out when W is a `Problem`.
    protected : array_like, optional
        As in `grace_opt.solve`.
    seed : int
        Of the search for the known choice.

    Returns
    -------
    Fixing

    Raises
    ------
    ProblemError
        As `grace_opt.solve`.
    OptionError
        For a batch: call it once per instance.

    Notes
    -----
    O(n³) for the shift and O(n²) to O(n³) per vertex probed. Rounding is covered: what is fixed stays fixed in exact
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
    run = Run(checked_seed(seed))
    spec = registry.get("tabu")
    mask = spec.solve(problem.flatten(), spec.make_options({}), run).mask[0].cpu().numpy()
    W64 = problem.W.detach().to("cpu").double().numpy()
    objective = math.fsum(W64[np.ix_(mask, mask)].ravel().tolist())
    sub, scale = Subproblem.of(problem, mask)
    inside, outside = np.zeros(problem.n, bool), ~problem.candidates.cpu().numpy()
    if sub is None:  # weights too far apart for a relaxation
        return Fixing(inside, outside, objective, -math.inf)
    # Ties must stay: only what costs clearly more than the known choice is ruled out.
    tie = (OPTIMALITY_RTOL * abs(objective) + float(rounding(problem, torch.from_numpy(mask)))) / scale
    ((left, bound),) = map_in_threads(lambda part: narrowed(part, objective / scale, -tie, run), [sub])
    inside[left.chosen] = True
    outside |= ~inside & ~np.isin(np.arange(problem.n), left.vertices)
    return Fixing(inside, outside, objective, min(bound * scale, objective))


def narrowed(
    sub: Subproblem, incumbent: float, slack: float, run: Run | None = None, *, shifts: int = ROUNDS
) -> tuple[Subproblem, float]:
    """What probing leaves of a subproblem, and a lower bound on everything it left out and kept.

    Parameters
    ----------
    sub : Subproblem
    incumbent : float
        Objective of a known choice.
    slack : float
        Choices of ``incumbent - slack`` and more may be lost (negative: must be kept up to there).
    run : Run, optional
        Probing stops when its time is over.
    shifts : int
        Go on with the diagonal of `shifted`, at most so often, where the plain relaxation fixes no more.

    Returns
    -------
    sub : Subproblem
        What is left; empty of meaning where `bound` is the cutoff.
    bound : float
        At most the cutoff ``incumbent - slack``; equal to it if nothing below it exists.
    """
    cutoff, bound = incumbent - slack, -math.inf
    for tight, rounds in ((False, ROUNDS), (True, shifts)):
        for _ in range(rounds):
            if sub.forced or (run is not None and not run.has_time(SECONDS * sub.m**3)):
                return sub, min(cutoff, max(bound, value_if_forced(sub)))
            relaxation = shifted(sub, incumbent, run=run) if tight else relax(sub)
            bound = max(bound, relaxation.bound)
            if bound >= cutoff:
                return sub, cutoff
            verdict = probed(sub, relaxation, cutoff, run)
            if not verdict.any():
                break
            few = np.count_nonzero(verdict) < WORTH_ANOTHER * sub.m
            sub = sub.fixed(verdict)
            if not 0 <= sub.k <= sub.m:
                return sub, cutoff
            if few:
                break
    return sub, min(cutoff, max(bound, value_if_forced(sub)))


def probed(sub: Subproblem, relaxation: Relaxation, cutoff: float, run: Run | None = None) -> npt.NDArray[np.int8]:
    """What probing every vertex decides: 1 = in, 2 = out, 0 = open, for all choices below `cutoff`."""
    from ..kernels.relaxation.cpu import probe

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


def value_if_forced(sub: Subproblem) -> float:
    """The objective where nothing is left to decide, less what rounding may have added; -inf elsewhere."""
    if not sub.forced:
        return -math.inf
    value, size = sub.constant, sub.constant_size
    if sub.k:
        value += float(sub.linear.sum() + sub.W.sum())
        size += float(sub.linear_size.sum() + np.abs(sub.W).sum())
    return value - SUM_MARGIN * (len(sub.chosen) + sub.m) * _EPS * size
