"""Read in one pass what the checks of W need: compiled on the CPU, in torch elsewhere and for small W."""

from __future__ import annotations

from torch import Tensor

from ..._shared.operation import Compiled, Operation, trial_of
from ..._shared.threads import COMPILE_FROM, worth_one_pass
from . import reference
from .reference import Extremes as Extremes

OPERATION = Operation(
    "extremes",
    "the checks of W: finite, symmetric, how large",
    cpu=Compiled(f"from {COMPILE_FROM:,} entries of W on", trial_of(__name__, "cpu"), "plain loops"),
)


def extremes(W: Tensor) -> Extremes:
    """Return per instance of W (..., n, n): finite or not, the largest absolute entry, the deviation from symmetry."""
    if worth_one_pass(W):
        from .cpu import extremes_of

        return extremes_of(W)
    return reference.extremes(W)
