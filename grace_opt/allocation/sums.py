"""Sums in float64 that keep the rounding errors of their additions: of objectives, costs and bounds."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor

from ..kernels.solve.objective.reference import is_doubtful, rounded_sum

EPS = torch.finfo(torch.float64).eps


def exact_sum(terms: Tensor) -> Tensor:
    """Sum over the last dimension, rounded once, as by `math.fsum`; float64.

    Examples
    --------
    >>> exact_sum(torch.tensor([1e17, 1.0, -1e17], dtype=torch.float64))
    tensor(1., dtype=torch.float64)
    """
    if terms.shape[-1] == 0:
        return terms.new_zeros(terms.shape[:-1])
    value, rest = rounded_sum(terms)
    doubtful = is_doubtful(value, rest, terms.abs().sum(-1)).flatten().nonzero().flatten().tolist()
    if doubtful:
        value, rows = value.clone(), terms.reshape(-1, terms.shape[-1])
        flat = value.view(-1)
        for row in doubtful:
            flat[row] = math.fsum(rows[row].tolist())
    return value


def running_sums(terms: Tensor) -> Tensor:
    """Sums of the first 1, 2, … entries of the last dimension, each rounded once, as by `exact_sum`.

    The rounding errors of the additions are added back, and those of adding these. If there are none of the latter, as
    with numbers of like size, ties are known to be ties. Where what is lost might decide on a last digit, the sum is
    made of whole numbers.

    Examples
    --------
    >>> running_sums(torch.tensor([1e17, 1.0, -1e17], dtype=torch.float64))[-1]
    tensor(1., dtype=torch.float64)
    """
    total, errors = _with_errors(terms)
    low, errors = _with_errors(errors)
    middle = total + low
    part = middle - total
    rest = (total - (middle - part)) + (low - part) + errors.cumsum(-1)
    value = middle + rest
    left, lost = (rest - (value - middle)).abs(), errors.abs().cumsum(-1)
    digit = value.abs().nextafter(torch.full_like(value, math.inf)) - value.abs()
    margin = 8.0 * EPS * terms.shape[-1] * lost + 2.0**-20 * digit
    tie = torch.stack([(left - share * digit).abs() <= margin for share in (0.5, 0.25)]).any(0)
    doubtful = tie & (lost > 0)
    for row in doubtful.reshape(-1, value.shape[-1]).any(-1).nonzero().flatten().tolist():
        own = value.view(-1, value.shape[-1])[row]
        exactly = [sum_ / _UNITS for sum_ in accumulate(map(_in_units, terms.reshape(-1, len(own))[row].tolist()))]
        own.copy_(torch.where(doubtful.view(-1, len(own))[row], own.new_tensor(exactly), own))
    return value


def _with_errors(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Running sums, and the rounding error of each addition (Knuth)."""
    total = terms.cumsum(-1)
    before = torch.nn.functional.pad(total[..., :-1], (1, 0))
    part = total - before
    return total, (before - (total - part)) + (terms - part)


#: Of which every float64 is a whole number.
_UNITS = 2**1074


def _in_units(number: float) -> int:
    numerator, denominator = number.as_integer_ratio()
    return numerator * (_UNITS // denominator)
