"""`as_matrix` and `in_form`: a bound gets W in the form that it reads, or says which bound reads W's own.

When: the first line of a public bound.
"""

from __future__ import annotations

from typing import TypeVar

from ..errors import ProblemError
from ..kernels.solve.weights import Weights
from ..problem import Problem, SparseWeights

Form = TypeVar("Form", bound=Weights)


def as_matrix(problem: Problem, name: str) -> Problem:
    """Return the problem with W as a tensor, for the bound of this name.

    Raises
    ------
    ProblemError
        If W is sparse and does not fit into free memory, or is in a form that rounds when it is written out.
    """
    if problem.weights is None or isinstance(problem.weights, SparseWeights):
        return problem.dense(name)
    raise ProblemError(
        f"{name} reads W as a matrix, and W in its {problem.weights.form} form would be rounded: use "
        "grace_opt.bounds.certificate, which allows for it."
    )


def in_form(problem: Problem, form: type[Form], name: str) -> Form:
    """Return W in the form that the bound of this name reads; raises ProblemError if it is in another."""
    if not isinstance(problem.W, form):
        made = " (of few vertices or many edges, W is made dense)" if form is SparseWeights else ""
        raise ProblemError(
            f"{name} reads W in its {form.form} form, and it is a {type(problem.W).__name__}{made}: use "
            "grace_opt.bounds.certificate, which takes every form."
        )
    return problem.W
