"""f in float64, exact to the last digit, and the sum of the absolute weights, in one pass over W.

Compiled on the CPU; elsewhere, and for small inputs, torch operations.
"""

from __future__ import annotations

import math

from torch import Tensor

from ..._shared.operation import Compiled, Operation, trial_of
from ..._shared.threads import COMPILE_FROM, worth_one_pass
from . import reference
from .reference import Sums as Sums
from .reference import is_doubtful as is_doubtful
from .reference import is_exact

OPERATION = Operation(
    "objective",
    "f of a choice, in float64",
    cpu=Compiled(f"from {COMPILE_FROM:,} entries of W on", trial_of(__name__, "cpu")),
)


def objective(W: Tensor, mask: Tensor) -> Tensor:
    """Return f, rounded once to float64, (...); mask (..., n) selects rows of W."""
    return exact_sums(W, mask).value


def magnitude(W: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of |W_ij| over the chosen vertices, float64, (...): rounding of f is relative to it."""
    return _sums(W, mask).size


def exact_sums(W: Tensor, mask: Tensor) -> Sums:
    """Return both, of one pass over W."""
    sums = _sums(W, mask)
    value, doubtful = sums.value, is_doubtful(*sums).flatten().nonzero().flatten()
    if len(doubtful):
        matrices, masks = W.reshape(-1, *W.shape[-2:]), mask.reshape(-1, mask.shape[-1])
        doubtful = doubtful[~is_exact(matrices[doubtful], masks[doubtful], sums.size.flatten()[doubtful])]
        value = value.clone()
        flat = value.view(-1)
        for b in doubtful.tolist():
            flat[b] = math.fsum(matrices[b][masks[b]][:, masks[b]].double().flatten().tolist())
    return sums._replace(value=value)


def _sums(W: Tensor, mask: Tensor) -> Sums:
    """Return f by sums in pairs, and the sum of |W_ij| over the chosen vertices."""
    if worth_one_pass(W):
        from .cpu import sums

        return sums(W, mask)
    return reference.sums(W, mask)
