"""Checks of what a solver returns: its form, its bound, and that the solver left W unchanged.

Other packages add methods too. A mistake in one of them raises a `SolverError` that names the method, and never becomes
an answer. `registry.SolverSpec.solve` and `api.solve` call these checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._util.array_like import as_tensor
from .._util.parameters import shown
from ..errors import ProblemError, SolverError
from ..problem import Problem
from ..solution import SolverResult


def checked_result(result: Any, problem: Problem, name: str) -> SolverResult:
    """The result, if valid for `problem`, with tensors on W's device and bounds in float64; reads no data.

    Raises
    ------
    SolverError
        The message names the method and what it should return.
    """
    if not isinstance(result, SolverResult) or not isinstance(result.mask, Tensor):
        got = (
            f"SolverResult({type(result.mask).__name__})" if isinstance(result, SolverResult) else type(result).__name__
        )
        raise SolverError(f"method {name!r} returned {got}: return SolverResult(mask), the mask a bool torch tensor.")
    mask, expected, device = result.mask, tuple(problem.candidates.shape), problem.weights.device
    if mask.dtype != torch.bool or tuple(mask.shape) != expected or mask.device != device:
        raise SolverError(
            f"{name} returned a mask of dtype {mask.dtype} and shape {tuple(mask.shape)} on {mask.device}; "
            f"expected bool {expected} on {device}."
        )
    if not isinstance(result.stats, Mapping):
        raise SolverError(f"{name} returned stats of type {type(result.stats).__name__}: give a dict of counters.")
    size = problem.batch_shape
    for key, value in result.stats.items():
        if isinstance(value, Tensor) and tuple(value.shape[: len(size)]) != size:
            raise SolverError(
                f"{name} returned the statistic {key!r} as a tensor of shape {tuple(value.shape)}: give one entry per "
                f"instance, {(*size, '...')}, or plain numbers."
            )
    named = result.objective_stats
    if not isinstance(named, tuple) or any(key not in result.stats for key in named):
        raise SolverError(f"{name} returned objective_stats={shown(named)}: give a tuple of names that are in stats.")
    return replace(
        result,
        lower_bound=_per_instance(result.lower_bound, torch.float64, problem, f"{name}: SolverResult.lower_bound"),
        limit=_per_instance(result.limit, torch.bool, problem, f"{name}: SolverResult.limit"),
        objective=_per_instance(result.objective, torch.float64, problem, f"{name}: SolverResult.objective"),
    )


def _per_instance(value: Any, dtype: torch.dtype, problem: Problem, name: str) -> Tensor | None:
    if value is None:
        return None
    expected = problem.batch_shape
    wanted = f"{'bools' if dtype == torch.bool else 'numbers'} of shape {expected}, one per instance"
    try:
        tensor = as_tensor(value, name, wanted)
    except ProblemError as error:
        raise SolverError(str(error)) from None
    if tuple(tensor.shape) != expected or (tensor.dtype == torch.bool) != (dtype == torch.bool):
        raise SolverError(f"{name} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}: give {wanted}.")
    return tensor.to(problem.weights.device, dtype)


def copy_of_problem(problem: Problem) -> Problem:
    """A copy of the problem, for a solver that might write into its input."""
    required = None if problem.required is None else problem.required.clone()
    own = problem.weights.clone(), problem.k.clone(), problem.candidates.clone()
    return replace(problem, weights=own[0], k=own[1], candidates=own[2], required=required)


def refuse_overwritten(given: Problem, left: Problem, name: str) -> None:
    """Raise SolverError if a solver changed `left`, its copy of the problem `given`: its bounds then mean nothing."""
    same = {
        "W": _same_weights(given, left),
        "k": torch.equal(given.k, left.k),
        "candidates": torch.equal(given.candidates, left.candidates),
        "required": given.required is left.required is None or _equal(given.required, left.required),
    }
    if not all(same.values()):
        what = " and ".join(f"problem.{part}" for part, equal in same.items() if not equal)
        raise SolverError(f"{name} wrote into {what} (a copy; yours is unchanged): a solver must work on a clone().")


def _same_weights(given: Problem, left: Problem) -> bool:
    before, after = given.weights.numbers(), left.weights.numbers()
    return len(before) == len(after) and all(map(_equal, before, after))


def _equal(one: Any, other: Any) -> bool:
    """Whether both are tensors with the same numbers; a solver may have put in anything."""
    alike = (
        isinstance(one, Tensor) and isinstance(other, Tensor) and (one.dtype, one.device) == (other.dtype, other.device)
    )
    return alike and torch.equal(one, other)


def bound_within_rounding(problem: Problem, mask: Tensor, value: Tensor, bound: Tensor, name: str) -> Tensor:
    """`bound`, lowered to f where it exceeds f by no more than rounding.

    Raises
    ------
    SolverError
        If it exceeds f by more, or is NaN.
    """
    if bool(((bound > value) | bound.isnan()).any()):
        # Rounding error of a solver's own sum of f.
        rounding = 4 * problem.n * float(np.finfo(np.float64).eps) * problem.weights.magnitude(mask)
        wrong = ~(bound <= value + rounding)
        if bool(wrong.any()):
            b = int(wrong.nonzero()[0])
            raise SolverError(
                f"{name} returned the lower bound {float(bound[b])!r} for instance {b}, but f of the choice is "
                f"{float(value[b])!r}: a bound is at most f."
            )
    return torch.minimum(bound, value)
