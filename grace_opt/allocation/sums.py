"""Sums in float64 that keep the rounding errors of their additions: of objectives, costs and bounds."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..kernels.objective import CANCELLED
from ..kernels.objective.reference import paired_sums

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
    if terms.device.type == "cpu":
        high, low = (torch.from_numpy(np.asarray(part)) for part in paired_sums(terms.numpy(), np.zeros))
    else:
        high, low = paired_sums(terms, terms.new_zeros)
    value = high + low
    # If nearly everything cancels, pairs cannot hold the rest; nor can they tell on which side of a tie the sum lies.
    rest = (low - (value - high)).abs()
    digit = value.abs().nextafter(torch.full_like(value, math.inf)) - value.abs()
    tie = torch.stack([(rest - share * digit).abs() <= 2.0**-20 * digit for share in (0.5, 0.25)]).any(0)
    cancelled = value.abs() < CANCELLED * terms.abs().sum(-1)
    doubtful = (tie | cancelled).flatten().nonzero().flatten().tolist()
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
    return total + ((before - (total - part)) + (terms - part)).cumsum(-1)
