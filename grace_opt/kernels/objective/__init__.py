"""f in float64, to its last digit, and the sum of the absolute weights: one pass over W.

Compiled on the CPU; elsewhere, and for small inputs, torch operations.
"""

from __future__ import annotations

import math

from torch import Tensor

from .._shared.operation import Compiled, Operation, trial_of
from .._shared.threads import COMPILE_FROM, worth_one_pass
from . import reference

#: Where f is less than this of the sum of the absolute weights, it is summed once more, without any rounding.
CANCELLED = 2.0**-36

OPERATION = Operation(
    "objective",
    "f of a choice, in float64",
    cpu=Compiled(f"from {COMPILE_FROM:,} entries of W on", trial_of(__name__, "cpu")),
)


def objective(W: Tensor, mask: Tensor) -> Tensor:
    """f in float64, (...), to its last digit; mask (..., n) as W's rows."""
    value, size = _sums(W, mask)
    doubtful = (value.abs() < CANCELLED * size).flatten().nonzero().flatten().tolist()
    if doubtful:  # so much has cancelled that pairs of numbers may not hold what is left
        value = value.clone()
        matrices, masks, flat = W.reshape(-1, *W.shape[-2:]), mask.reshape(-1, mask.shape[-1]), value.view(-1)
        for b in doubtful:
            flat[b] = math.fsum(matrices[b][masks[b]][:, masks[b]].double().flatten().tolist())
    return value


def magnitude(W: Tensor, mask: Tensor) -> Tensor:
    """The sum of |W_ij| over the chosen vertices, float64, (...): what rounding of f is relative to."""
    return _sums(W, mask)[1]


def _sums(W: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """f by sums in pairs, and the sum of |W_ij| over the chosen vertices."""
    if worth_one_pass(W):
        from .cpu import sums

        return sums(W, mask)
    return reference.sums(W, mask)
