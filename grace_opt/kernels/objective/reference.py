"""Sums over a choice in torch operations, in pairs of numbers, for any device: the definition of f in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def sums(W: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return f by sums in pairs, and the sum of |W_ij| over the chosen vertices; both (...), float64."""
    both = mask.unsqueeze(-1) & mask.unsqueeze(-2)
    terms = torch.where(both, W.to(torch.float64), 0.0).flatten(-2)
    if W.device.type == "cpu":
        return torch.from_numpy(np.asarray(paired_sum(terms.numpy(), np.zeros))), terms.abs().sum(-1)
    return paired_sum(terms, terms.new_zeros), terms.abs().sum(-1)


def paired_sum(terms: Any, zeros: Callable[[tuple[int, ...]], Any]) -> Any:
    """Sum over the last dimension by adding halves, keeping the rounding errors separately (TwoSum)."""
    high, low = paired_sums(terms, zeros)
    return high + low


def paired_sums(terms: Any, zeros: Callable[[tuple[int, ...]], Any]) -> tuple[Any, Any]:
    """Return the sum over the last dimension by adding halves, and the sum of the rounding errors."""
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
