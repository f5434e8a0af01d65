"""`of_batch`: what every public bound does first.

It refuses by name what is no problem, no flattened batch, or no `Run`. And it lets numbers below the smallest become 0,
as numpy does by default, whatever the caller has set.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from .._util.parameters import shown
from ..errors import OptionError, ProblemError
from ..problem import Problem
from ..run import Run

Rest = ParamSpec("Rest")
Found = TypeVar("Found")


def of_batch(bound: Callable[Concatenate[Problem, Rest], Found]) -> Callable[Concatenate[Problem, Rest], Found]:
    """Decorate a function that bounds each instance of a flattened batch.

    Examples
    --------
    >>> from grace_opt.bounds import row_bound
    >>> problem = Problem.of([[4.0, 1.0], [1.0, 3.0]], 1)
    >>> row_bound(problem)
    Traceback (most recent call last):
    grace_opt.errors.ProblemError: row_bound takes a flattened batch, ... shape (): write row_bound(problem.flatten()).
    >>> row_bound(problem.flatten()).round(decimals=6)
    tensor([3.], dtype=torch.float64)
    """
    name, signature = bound.__name__, inspect.signature(bound)
    run = signature.parameters.get("run")

    @functools.wraps(bound)
    def checked(problem: Problem, *given: Rest.args, **named: Rest.kwargs) -> Found:
        if not isinstance(problem, Problem):
            kind = type(problem).__name__
            raise ProblemError(f"{name} takes a Problem, not a {kind}: write {name}(Problem.of(W, k).flatten()).")
        if problem.k.dim() != 1:
            raise ProblemError(
                f"{name} takes a flattened batch, and this problem has the batch shape {tuple(problem.k.shape)}: write "
                f"{name}(problem.flatten())."
            )
        if run is not None:
            its = signature.bind(problem, *given, **named).arguments.get("run", run.default)
            if not isinstance(its, Run) and its is not run.default:
                raise OptionError(f"run={shown(its)}: give a grace_opt.run.Run, such as Run() for one without limits.")
        with np.errstate(under="ignore"):
            return bound(problem, *given, **named)

    return checked  # type: ignore[return-value]  # its first parameter keeps its name
