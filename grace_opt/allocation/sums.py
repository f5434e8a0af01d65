"""Sums in float64 that keep the rounding errors of their additions: of objectives, costs and bounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.objective.reference import is_doubtful, rounded_sum

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
    """Sums of the first 1, 2, … entries of the last dimension, with the rounding errors of the additions added back.

    Examples
    --------
    >>> running_sums(torch.tensor([1e17, 1.0, -1e17], dtype=torch.float64))[-1]
    tensor(1., dtype=torch.float64)
    """
    total = terms.cumsum(-1)
    before = torch.nn.functional.pad(total[..., :-1], (1, 0))
    part = total - before
    low = ((before - (total - part)) + (terms - part)).cumsum(-1)
    value = total + low
    # Not `is_doubtful`, after which every such sum would be made anew: of two numbers as near, the larger.
    above = value.nextafter(torch.full_like(value, math.inf))
    half = (above - value) / 2
    return torch.where((low - (value - total) == half) & (half > 0), above, value)
