"""`certificate`: the bound that ``certify=`` and `portfolio` show beside an answer, the best that a level can afford.

It is computed after a method has run, with the method's answer as the known choice that fixing needs, and within what
is left of the time limit: cheap bounds first, and what does not fit is left out.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import objective
from ..errors import OptionError
from ..problem import Problem
from ..run import Run
from .batched import AT_ONCE, ROW_SECONDS, eigenvalue_bound, row_bound_in_time
from .convexity import CHOLESKY_FROM, convex_shift
from .incumbents import checked_incumbent
from .qcr import seconds_to_relax
from .sdp_primal import free_memory
from .tight import FAST, FIXING_RTOL, fast_bound, tight_bound

#: Levels of ``certify=``, first the default.
LEVELS = ("fast", "tight")
#: What a certificate takes on one core, roughly: times n³, or of large W as many plain relaxations; and to start.
SECONDS_PER_CUBE, RELAXATIONS, TO_START = {"fast": 3e-8, "tight": 1.3e-7}, 6, 0.02
#: A bound that usually takes longer than this shows by what it takes how fast the others will be.
LONG_ENOUGH = 0.01
#: Up to this many vertices `eigenvalue_bound` is cheap, and says more than a relaxation where W is nearly of rank one.
LARGEST_EIGEN = 500
#: Matrices of n² float64 numbers that a relaxation needs beside W.
COPIES = 6


def certificate(problem: Problem, level: str = "fast", *, incumbent: Any = None, run: Run | None = None) -> Tensor:
    """A certified lower bound per instance: the best of those that a level affords.

    Parameters
    ----------
    problem : Problem
        A flattened batch, of any n.
    level : {"fast", "tight"}
        ``"fast"``: the best of `row_bound`, `fast_bound` and `eigenvalue_bound`; some milliseconds per instance of 64
        vertices, seconds for 5000. ``"tight"``: `tight_bound` as well, where these leave a gap.
    incumbent : Tensor (B, n), bool, optional
        A known choice per instance: `solve` gives the answer. Default: greedy and exchanges.
    run : Run, optional
        What does not fit into its time is left out: `entry_bound` may be all that does, or nothing, which leaves -inf.
        What takes no longer than 0.05 seconds is computed in any case.

    Returns
    -------
    Tensor, shape (B,), float64
        On the CPU in as many threads as torch has; what needs more memory than is free is left out.

    Raises
    ------
    OptionError
        For an unknown level, and an incumbent that is none.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]]), 2).flatten()
    >>> round(float(certificate(p)), 6)  # the optimum is 5
    5.0
    """
    if level not in LEVELS:
        raise OptionError(f"level={level!r}: give one of {', '.join(map(repr, LEVELS))}.")
    run = Run() if run is None else run
    began, usual = time.monotonic(), ROW_SECONDS * problem.W.numel()
    best = row_bound_in_time(problem, run)
    if usual > LONG_ENOUGH:  # to tell how busy the machine is
        run = replace(run, pace=max(1.0, (time.monotonic() - began) / usual))
    if not run.stopped and seconds_to_certify(problem, level) <= AT_ONCE:
        run = Run()
    best = torch.where(best.isfinite(), best, -torch.inf)  # sums beyond float64
    if not run.has_time(seconds_to_relax(problem.n)) or free_memory() < COPIES * 8.0 * problem.n**2:
        return best
    masks = checked_incumbent(problem, incumbent)
    value = objective.evaluate(problem.W, masks)
    for relaxed in (fast_bound, tight_bound)[: 1 + LEVELS.index(level)]:  # "tight" is never below "fast"
        rows = (best < value - FIXING_RTOL * value.abs()).nonzero().squeeze(-1)
        if len(rows):
            best[rows] = torch.maximum(best[rows], relaxed(problem.instances(rows), masks[rows], run))
    rows = (best < value - FAST.gap_left * value.abs()).nonzero().squeeze(-1)
    if len(rows) and problem.n <= LARGEST_EIGEN and run.has_time(2 * seconds_to_relax(problem.n) * len(rows)):
        best[rows] = torch.maximum(best[rows], eigenvalue_bound(problem.instances(rows)))
    return best


@cache
def prepare() -> None:
    """Have what certificates are made of imported and compiled, before a time limit starts to run."""
    place = torch.arange(24.0, dtype=torch.float64, device="cpu")
    small = Problem.of(torch.cos(7 * place[:, None] * place)[None], 12)  # nothing settles it: every part is called
    certificate(small, "tight")
    convex_shift(np.diag(np.arange(float(CHOLESKY_FROM))))


def seconds_to_certify(problem: Problem, level: str = "fast") -> float:
    """What a certificate takes, roughly: what a method with a time limit leaves for it."""
    n, threads = problem.n, max(1, min(len(problem.k), torch.get_num_threads()))
    cubic = level == "tight" or n <= FAST.probed
    each = SECONDS_PER_CUBE[level] * n**3 if cubic else RELAXATIONS * seconds_to_relax(n)
    return TO_START + ROW_SECONDS * problem.W.numel() + each * len(problem.k) / threads
