r"""Tighter certified bounds, instance by instance in threads: QCR by coordinate ascent, DNN + RLT, and both after
fixing.

* `plain_bound`: the convex relaxation with a diagonal shift that is a multiple of the node weights or row sums.
* `qcr_bound`: the convex relaxation with the best diagonal that coordinate ascent finds.
* `dnn_bound`: products of pairs as well; what a semidefinite solver would give, at the price of some 100 eigenvalue
  problems.
* `tight_bound`: what ``certify="tight"`` computes. Vertices that a known choice rules in or out are fixed first, which
  mostly settles attention's W; then the two bounds above as far as they are needed.

Every value is a bound whatever the iterations reached (`grace_opt.bounds.qcr` says why, and by what margins for
rounding). Sources: as `grace_opt.bounds.qcr` and `grace_opt.bounds.dnn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import objective, registry
from ..errors import SolverError
from ..parallel import map_in_threads
from ..problem import Problem
from ..run import Run
from ..solution import STEP_MARGIN
from . import fixing
from .dnn import strengthened
from .qcr import MOST_VERTICES, relax, shifted
from .subproblem import Subproblem, objective_step

#: `tight_bound` probes so often with the shifted relaxation, and goes on to so many steps of the method of multipliers
#: where the gap is still larger than this: chosen on attention's W for about 10 ms per instance.
SHIFTS, ENOUGH, STEPS = 1, 0.08, 60
#: Length of the search for the known choice.
ITERATIONS_PER_VERTEX = 5
_EPS = torch.finfo(torch.float64).eps


def plain_bound(problem: Problem) -> Tensor:
    """Lower bound from the plain convex relaxation: `continuous_bound`, compiled and solved to the end.

    Parameters, returns and raises as `qcr_bound`.

    Notes
    -----
    O(n³) for the shift, O(n) per pairwise step.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[2.0, 1.0], [1.0, 2.0]]), 1).flatten()
    >>> round(float(plain_bound(p)), 6)
    2.0
    """
    return _bounds(problem, "mies", lambda sub, value: relax(sub).bound)[0]


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
        If n is beyond 2000.

    Notes
    -----
    O(n³) per sweep, some 100 sweeps. References: Billionnet, Elloumi & Plateau, Discrete Appl. Math. 157 (2009).

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 2.0]]), 2).flatten()
    >>> round(float(qcr_bound(p)), 4)  # the optimum is 4
    4.0
    """
    return _bounds(problem, "mies", lambda sub, value: shifted(sub, value).bound)[0]


def dnn_bound(problem: Problem) -> Tensor:
    """Lower bound from the doubly nonnegative relaxation with products of pairs (DNN + RLT), by a first-order method.

    Parameters, returns and raises as `qcr_bound`.

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
    return _bounds(problem, "mies", lambda sub, value: strengthened(sub, value)[0].bound)[0]


def tight_bound(problem: Problem) -> Tensor:
    """Lower bound after fixing what a known choice rules out, by QCR-CD and, where a gap is left, DNN + RLT.

    Parameters, returns and raises as `qcr_bound`. Where fixing leaves nothing to decide, or nothing better than the
    known choice (found by `tabu`), the bound is the optimum to 1e-9.

    Notes
    -----
    A few milliseconds per instance on attention's W of 64 channels; as `dnn_bound` at worst.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]]), 2).flatten()
    >>> round(float(tight_bound(p)), 6)  # the optimum is 5
    5.0
    """

    return open_bound(problem)[0]


def open_bound(problem: Problem) -> tuple[Tensor, Tensor]:
    """`tight_bound`, and where it leaves a gap to the choice that it knows: (B,) float64 and (B,) bool."""

    def bound(sub: Subproblem, value: float) -> float:
        left, best = fixing.narrowed(sub, value, 1e-10 * abs(value), shifts=SHIFTS)
        if best < value - ENOUGH * abs(value) and 0 < left.k < left.m:
            best = max(best, strengthened(left, value, steps=STEPS)[0].bound)
        return min(best, value)

    found, values = _bounds(problem, "tabu", bound)
    return found, found < values - ENOUGH * values.abs()


def _bounds(problem: Problem, known: str, bound: Callable[[Subproblem, float], float]) -> tuple[Tensor, Tensor]:
    """`bound(sub, value)` of every instance, and value, f of a choice by method `known`, which forced ones get."""
    if problem.n > MOST_VERTICES:
        raise SolverError(
            f"n = {problem.n} is beyond {MOST_VERTICES}, for which this bound takes O(n³) time many times over: use "
            "certify='fast', or grace_opt.bounds.row_bound, which takes O(n²)."
        )
    spec = registry.get(known)
    options = {"iterations": ITERATIONS_PER_VERTEX * problem.n} if known == "tabu" else {}
    masks = spec.solve(problem, spec.make_options(options), Run()).mask
    values = objective.evaluate(problem.W, masks).tolist()

    def one(b: int) -> float:
        instance = problem.instance(b)
        sub, scale = Subproblem.of(instance, masks[b].cpu().numpy())
        if sub is None:
            return -math.inf
        if sub.forced:
            return float(values[b])
        value = float(values[b]) / scale
        found = min(value, bound(sub, value))
        step = objective_step(instance) / scale
        if step:  # objectives are whole steps: the next one above the bound, however the quotient is rounded
            steps = found / step
            found = max(found, min(value, step * math.ceil(steps - STEP_MARGIN - 4.0 * _EPS * abs(steps))))
        return float(found * scale)

    found = torch.tensor(map_in_threads(one, range(len(values))), dtype=torch.float64, device=problem.W.device)
    return found, found.new_tensor(values)
