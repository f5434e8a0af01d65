"""`certificate`: the lower bound that ``certify=`` and `portfolio` add to an answer; the best that its level affords.

It is computed after a method has run: the method's answer is the known choice that fixing needs. Cheap bounds come
first; those that do not fit into the rest of the time limit are skipped.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache, singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._util.cores import thread_count
from .._util.memory import free_memory
from .._util.parameters import choice
from ..problem import FactoredWeights, Problem, SparseWeights, Weights
from ..problem.dense import small_weights
from ..run import Run
from .batched import AT_ONCE, LARGEST_EIGEN, ROW_SECONDS, eigenvalue_bound, in_chunks, row_bound_in_time
from .convexity import CHOLESKY_FROM, convex_shift
from .factored import CLOSING, factored_bound
from .incumbents import checked_incumbent
from .lagrangian import lagrangian_bound
from .of_batch import of_batch
from .qcr import seconds_to_relax
from .sparse import seconds_to_bound, sparse_bound
from .tight import FAST, FIXING_RTOL, fast_bound, tight_bound

#: Levels of ``certify=``; the first is the default.
LEVELS = ("fast", "tight")
#: Approximate cost of a certificate on one core: seconds times n³, or for large W this many plain relaxations; plus
#: seconds to start.
SECONDS_PER_CUBE, RELAXATIONS, TO_START = {"fast": 3e-8, "tight": 1.3e-7}, 6, 0.02
#: Number of products of W in factors with a vector that a bound takes.
PRODUCTS = 60
#: If the first bound usually takes longer than this (seconds), its time shows how busy the machine is.
LONG_ENOUGH = 0.01
#: Up to this many vertices sparse W is also bounded as a tensor.
LARGEST_AS_TENSOR = {"fast": 2000, "tight": 5000}
#: Number of n² float64 matrices that a relaxation needs besides W.
COPIES = 6


@of_batch
def certificate(problem: Problem, level: str = "fast", *, incumbent: Any = None, run: Run | None = None) -> Tensor:
    """A certified lower bound per instance, the best that a level affords.

    Parameters
    ----------
    problem : Problem
        A flattened batch, of any n.
    level : {"fast", "tight"}
        ``"fast"``: the best of `row_bound`, `fast_bound` and `eigenvalue_bound`, and under constraints
        `grace_opt.bounds.lagrangian`; some milliseconds per instance of 64 vertices, seconds for 5000. ``"tight"``:
        `tight_bound` instead of `fast_bound`, which it is never below.
    incumbent : Tensor (B, n), bool, optional
        A known choice per instance; `solve` passes its answer. Default: greedy and exchanges.
    run : Run, optional
        Bounds that do not fit into its time are skipped: perhaps all but `entry_bound`, or all of them, which gives
        -inf. Anything that takes no longer than 0.05 seconds is computed in any case.

    Returns
    -------
    Tensor, shape (B,), float64
        Computed on the CPU in torch's number of threads; bounds that need more memory than is free are skipped.

    Raises
    ------
    OptionError
        If the level is unknown or the incumbent is not a valid choice.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]]), 2).flatten()
    >>> round(float(certificate(p)), 6)  # the optimum is 5
    5.0
    """
    choice("level", level, LEVELS)
    return _certificate(problem.weights, problem, level, incumbent, Run() if run is None else run)


@singledispatch
def _certificate(W: Weights, problem: Problem, level: str, incumbent: Any, run: Run) -> Tensor:
    """The certificate for W as a tensor."""
    began, usual = time.monotonic(), ROW_SECONDS * W.numel()
    best = row_bound_in_time(problem, run)
    if usual > LONG_ENOUGH:  # to tell how busy the machine is
        run = replace(run, pace=max(1.0, (time.monotonic() - began) / usual))
    if not run.stopped and seconds_to_certify(problem, level) <= AT_ONCE:
        run = Run()
    best = torch.where(best.isfinite(), best, -torch.inf)  # sums beyond float64
    if not run.has_time(seconds_to_relax(problem.n)) or free_memory() < COPIES * 8.0 * problem.n**2:
        return best
    masks = checked_incumbent(problem, incumbent)
    value = W.objective(masks)
    if len(rows := _open(best, value)):
        relaxed = fast_bound if level == "fast" else tight_bound
        found = relaxed(problem.instances(rows), masks[rows], run)
        best[rows] = torch.maximum(best[rows], found)
        left = _open(best, value)
        if len(left) and problem.n <= LARGEST_EIGEN and run.has_time(2 * seconds_to_relax(problem.n) * len(left)):
            best[left] = torch.maximum(best[left], in_chunks(eigenvalue_bound, problem.instances(left)))
    if problem.constraints is not None and len(_open(best, value)):
        best = torch.maximum(best, lagrangian_bound(problem, masks, run))
    return best


@_certificate.register
def _of_edges(W: SparseWeights, problem: Problem, level: str, incumbent: Any, run: Run) -> Tensor:
    """The certificate for sparse W: from its edges, and from W as a tensor where that is small."""
    best = sparse_bound(problem, run, level)
    tensor = problem.n <= LARGEST_AS_TENSOR[level] and free_memory() >= (COPIES + 1) * 8.0 * problem.n**2
    if tensor and run.has_time(_seconds_as_tensor(problem, level)):
        dense = problem.dense("the certificate")
        masks = checked_incumbent(dense, incumbent)
        if len(_open(best, W.objective(masks))):
            best = torch.maximum(best, certificate(dense, level, incumbent=masks, run=run))
    return best


@_certificate.register
def _of_columns(W: FactoredWeights, problem: Problem, level: str, incumbent: Any, run: Run) -> Tensor:
    """The certificate for W that is given by its columns: of its form, and of W as a tensor where that takes little."""
    best = form_bound(problem, run)
    if not (size := W.whole_at_once()) or not run.has_time(0.0):
        return best
    known = None if incumbent is None else checked_incumbent(problem, incumbent)
    for first in range(0, len(problem.k), size):
        rows = torch.arange(first, min(first + size, len(problem.k)), device=best.device)
        part, its = problem.instances(rows), None if known is None else known[rows]
        found = certificate(part.dense("certificate"), level, incumbent=its, run=run)
        if not problem.integer:
            found = found - part.weights.rounding(part.k, part.candidates)
        best[rows] = torch.maximum(best[rows], found)
    return best


@of_batch
def form_bound(problem: Problem, run: Run) -> Tensor:
    """What the certificate for W that is given by its columns has beside that of W as a tensor, (B,) float64.

    Parameters
    ----------
    problem : Problem
        A flattened batch.
    run : Run
        What does not fit into its time is left out, unless it takes no longer than 0.05 seconds.

    Examples
    --------
    >>> from grace_opt import FactoredWeights
    >>> W = FactoredWeights.product([[1.0, 2.0, 3.0]], [[1.0, 1.0, 1.0]])
    >>> round(float(form_bound(Problem.of(W, 2).flatten(), Run())), 6)
    9.0
    """
    weights = problem.weights.in_form(FactoredWeights, "form_bound")
    seconds = weights.product_seconds()
    each = CLOSING * seconds / max(1, len(problem.k))
    least = time.monotonic() + (AT_ONCE if PRODUCTS * seconds <= AT_ONCE and not run.stopped else 0.0)
    return factored_bound(problem, lambda: not run.has_time(each) and time.monotonic() >= least)


def _open(bound: Tensor, value: Tensor) -> Tensor:
    """Indices of the instances with a known choice that is not proved optimal yet."""
    return (bound < value - FIXING_RTOL * value.abs()).nonzero().squeeze(-1)


@cache
def prepare(sparse: bool = False) -> None:
    """Import and compile everything that certificates of tensors need, and of sparse W, before a time limit starts."""
    certificate(Problem.of(small_weights(), 12), "tight")
    convex_shift(np.diag(np.arange(float(CHOLESKY_FROM))))
    if sparse:
        sparse_bound(Problem.of(SparseWeights.small(), 12), Run(), "fast")


@of_batch
def seconds_to_certify(problem: Problem, level: str = "fast") -> float:
    """Approximate seconds that a certificate takes, which a method with a time limit leaves for it."""
    choice("level", level, LEVELS)
    return TO_START + _seconds(problem.weights, problem, level)


@singledispatch
def _seconds(W: Weights, problem: Problem, level: str) -> float:
    return _seconds_as_tensor(problem, level)


@_seconds.register
def _seconds_of_edges(W: SparseWeights, problem: Problem, level: str) -> float:
    tensor = _seconds_as_tensor(problem, level) if problem.n <= LARGEST_AS_TENSOR[level] else 0.0
    return seconds_to_bound(problem, level) + tensor


@_seconds.register
def _seconds_of_columns(W: FactoredWeights, problem: Problem, level: str) -> float:
    return _seconds_as_tensor(problem, level) if W.whole_at_once() else PRODUCTS * W.product_seconds()


def _seconds_as_tensor(problem: Problem, level: str) -> float:
    n, count = problem.n, len(problem.k)
    threads = thread_count(count)
    cubic = level == "tight" or n <= FAST.probed
    each = SECONDS_PER_CUBE[level] * n**3 if cubic else RELAXATIONS * seconds_to_relax(n)
    return ROW_SECONDS * count * n**2 + each * count / threads
