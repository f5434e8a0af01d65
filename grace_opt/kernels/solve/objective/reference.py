"""Sums over a choice in torch operations, in pairs of numbers, for any device: the definition of f in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

#: If a sum is a smaller share of the sum of absolute values than this, it is summed again without any rounding.
CANCELLED = 2.0**-36


class Sums(NamedTuple):
    """f of every choice, (...), float64; what its rounding left; and the sum of |W_ij| over the chosen vertices."""

    value: Tensor
    rest: Tensor
    size: Tensor


def sums(W: Tensor, mask: Tensor) -> Sums:
    """Return f by sums in pairs, and the sum of |W_ij| over the chosen vertices."""
    both = mask.unsqueeze(-1) & mask.unsqueeze(-2)
    terms = torch.where(both, W.to(torch.float64), 0.0).flatten(-2)
    return Sums(*rounded_sum(terms), terms.abs().sum(-1))


def rounded_sum(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over the last dimension, and by how much the sum in pairs exceeds it."""
    if terms.device.type == "cpu":
        high, low = (torch.from_numpy(np.asarray(part)) for part in paired_sums(terms.numpy(), np.zeros))
    else:
        high, low = paired_sums(terms, terms.new_zeros)
    value = high + low
    return value, low - (value - high)


def is_doubtful(value: Tensor, rest: Tensor, size: Tensor) -> Tensor:
    """Return whether pairs of numbers cannot say what the sum is rounded to.

    Nearly everything has cancelled, so that they do not hold the rest; or the sum lies next to the middle of two
    numbers, and what they do not hold decides on which side.
    """
    rest = rest.abs()
    digit = value.abs().nextafter(torch.full_like(value, math.inf)) - value.abs()
    tie = torch.stack([(rest - share * digit).abs() <= 2.0**-20 * digit for share in (0.5, 0.25)]).any(0)
    return tie | (value.abs() < CANCELLED * size)


def is_exact(W: Tensor, mask: Tensor, size: Tensor) -> Tensor:
    """Return whether pairs of numbers hold the sums over these choices (B, n); absolute values add up to `size`.

    Numbers of at most 24 digits are multiples of the last digit of the least of them, and so is all that is rounded
    away. That is at most half of a digit of `size` with each term, and fits into the second number of a pair.
    """
    if not W.dtype.is_floating_point or W.dtype.itemsize > 4:
        return torch.zeros(len(W), dtype=torch.bool, device=W.device)
    counted = mask.unsqueeze(-1) & mask.unsqueeze(-2) & (W != 0)
    least = torch.where(counted, W.abs(), torch.inf).amin((-2, -1)).double()
    return counted.sum((-2, -1)) * size * 2.0**-80 <= least


def paired_sums(terms: Any, zeros: Callable[[tuple[int, ...]], Any]) -> tuple[Any, Any]:
    """Return the sum over the last dimension by adding halves, and the sum of the rounding errors (TwoSum)."""
    *batch, count = terms.shape
    width = 1 << max(count - 1, 0).bit_length()
    high, low = zeros((*batch, width)), zeros((*batch, width))
    high[..., :count] = terms
    while width > 1:
        width //= 2
        left, right = high[..., :width], high[..., width : 2 * width]
        total = left + right
        part = total - left
        low = (low[..., :width] + low[..., width : 2 * width]) + ((left - (total - part)) + (right - part))
        high = total
    return high[..., 0], low[..., 0]
