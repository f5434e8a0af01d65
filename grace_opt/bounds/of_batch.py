"""`of_batch`: what every public bound does first.

It refuses what is no problem, or no flattened batch, by name. And it lets numbers below the smallest become 0, as numpy
does by default, whatever the caller has set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import numpy as np
from torch import Tensor

from ..errors import ProblemError
from ..problem import Problem

Rest = ParamSpec("Rest")


def of_batch(bound: Callable[Concatenate[Problem, Rest], Tensor]) -> Callable[Concatenate[Problem, Rest], Tensor]:
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

    @functools.wraps(bound)
    def checked(problem: Problem, *given: Rest.args, **named: Rest.kwargs) -> Tensor:
        name = bound.__name__
        if not isinstance(problem, Problem):
            kind = type(problem).__name__
            raise ProblemError(f"{name} takes a Problem, not a {kind}: write {name}(Problem.of(W, k).flatten()).")
        if problem.k.dim() != 1:
            raise ProblemError(
                f"{name} takes a flattened batch, and this problem has the batch shape {tuple(problem.k.shape)}: write "
                f"{name}(problem.flatten())."
            )
        with np.errstate(under="ignore"):
            return bound(problem, *given, **named)

    return checked  # type: ignore[return-value]  # its first parameter keeps its name
