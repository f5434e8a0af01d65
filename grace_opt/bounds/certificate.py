"""`certificate`: the bound that ``certify=`` and `portfolio` show beside an answer, the best that a level can afford.

It is computed after a method has run, with the method's answer as the known choice that fixing needs, and within what
is left of the time limit: cheap bounds first, and what does not fit is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import objective
from ..errors import OptionError
from ..problem import Problem
from ..run import Run
from .batched import ROW_SECONDS, row_bound_in_time
from .incumbents import checked_incumbent
from .qcr import seconds_to_relax
from .sdp_primal import free_memory
from .tight import FIXING_RTOL, fast_bound, tight_bound

#: Levels of ``certify=``, first the default.
LEVELS = ("fast", "tight")
#: Matrices of n² float64 numbers that a relaxation needs beside W.
COPIES = 6


def certificate(problem: Problem, level: str = "fast", *, incumbent: Any = None, run: Run | None = None) -> Tensor:
    """A certified lower bound per instance: the best of those that a level affords.

    Parameters
    ----------
    problem : Problem
        A flattened batch, of any n.
    level : {"fast", "tight"}
        ``"fast"``: the better of `row_bound` and `fast_bound`; some milliseconds per instance of 64
        vertices, seconds for 5000. ``"tight"``: `tight_bound` instead of `fast_bound`.
    incumbent : Tensor (B, n), bool, optional
        A known choice per instance: `solve` gives the answer. Default: greedy and exchanges.
    run : Run, optional
        What does not fit into its time is left out: `entry_bound` may be all that does, or nothing, which leaves -inf.

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
    best = row_bound_in_time(problem, run)
    best = torch.where(best.isfinite(), best, -torch.inf)  # sums beyond float64
    if not run.has_time(seconds_to_relax(problem.n)) or free_memory() < COPIES * 8.0 * problem.n**2:
        return best
    masks = checked_incumbent(problem, incumbent)
    value = objective.evaluate(problem.W, masks)
    rows = (best < value - FIXING_RTOL * value.abs()).nonzero().squeeze(-1)
    if len(rows):
        relaxed = fast_bound if level == "fast" else tight_bound
        best[rows] = torch.maximum(best[rows], relaxed(problem.instances(rows), masks[rows], run))
    return best


def seconds_to_certify(problem: Problem) -> float:
    """What a certificate takes at least, roughly: what a method with a time limit leaves for it."""
    return ROW_SECONDS * problem.W.numel() + seconds_to_relax(problem.n) * len(problem.k)
