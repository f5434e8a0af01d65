"""f in float64, exact to the last digit, and the sum of the absolute weights, in one pass over W.

Compiled on the CPU; elsewhere, and for small inputs, torch operations.
"""

from __future__ import annotations

import math

from torch import Tensor

from .._shared.operation import Compiled, Operation, trial_of
from .._shared.threads import COMPILE_FROM, worth_one_pass
from ..weights import Weights
from . import reference

#: If f is a smaller share of the sum of absolute weights than this, it is summed again without any rounding.
CANCELLED = 2.0**-36

OPERATION = Operation(
    "objective",
    "f of a choice, in float64",
    cpu=Compiled(f"from {COMPILE_FROM:,} entries of W on", trial_of(__name__, "cpu")),
)


def objective(W: Tensor | Weights, mask: Tensor) -> Tensor:
    """Return f in float64, (...), exact to the last digit; mask (..., n) selects rows of W."""
    if isinstance(W, Weights):
        return W.objective(mask)
    value, size = _sums(W, mask)
    doubtful = (value.abs() < CANCELLED * size).flatten().nonzero().flatten().tolist()
    if doubtful:  # too much has cancelled for pairs of numbers to hold the rest
        value = value.clone()
        matrices, masks, flat = W.reshape(-1, *W.shape[-2:]), mask.reshape(-1, mask.shape[-1]), value.view(-1)
        for b in doubtful:
            flat[b] = math.fsum(matrices[b][masks[b]][:, masks[b]].double().flatten().tolist())
    return value


def magnitude(W: Tensor | Weights, mask: Tensor) -> Tensor:
    """Return the sum of |W_ij| over the chosen vertices, float64, (...): rounding of f is relative to it."""
    if isinstance(W, Weights):
        return W.magnitude(mask)
    return _sums(W, mask)[1]


def _sums(W: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return f by sums in pairs, and the sum of |W_ij| over the chosen vertices."""
    if worth_one_pass(W):
        from .cpu import sums

        return sums(W, mask)
    return reference.sums(W, mask)
