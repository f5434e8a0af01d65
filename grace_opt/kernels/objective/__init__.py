"""What the checks of W need to know, f in float64, and indices of masks, in one pass each: compiled, on the CPU.

Elsewhere, and for small inputs, torch operations do. Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._shared.threads import COMPILE_FROM, in_threads

#: Where f is less than this of the sum of the absolute weights, it is summed once more, without any rounding.
CANCELLED = 2.0**-36


class Extremes(NamedTuple):
    """What there is to know about W before it is used, per instance, on the CPU.

    Attributes
    ----------
    finite : Tensor (...), bool
        Whether every entry is.
    largest, asymmetry : Tensor (...), float64
        max |W_ij| and max |W_ij - W_ji|, the latter infinite where it leaves float64; 0 if not all is finite.
    """

    finite: Tensor
    largest: Tensor
    asymmetry: Tensor


def extremes(W: Tensor) -> Extremes:
    """Finite or not, the largest size of an entry, and how far from symmetric, for each instance of W (..., n, n)."""
    if _compiled_suits(W):
        from .cpu import extremes as compiled

        arrays = W.reshape(-1, *W.shape[-2:]).contiguous().numpy()
        found = np.zeros(len(arrays), np.bool_), np.zeros(len(arrays)), np.zeros(len(arrays))
        in_threads(compiled, (arrays, *found))
        found[1][~found[0]] = 0.0
        return Extremes(*(torch.from_numpy(one).reshape(W.shape[:-2]) for one in found))
    wide = W.to(torch.float64)
    finite = wide.isfinite().all(-1).all(-1)
    largest, asymmetry = (one.abs().amax((-1, -2)).masked_fill(~finite, 0.0).cpu() for one in (wide, wide - wide.mT))
    return Extremes(finite.cpu(), largest, asymmetry)


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
    if _compiled_suits(W):
        from .cpu import objective as compiled

        arrays = W.reshape(-1, *W.shape[-2:]).contiguous().numpy()
        value, size = np.zeros(len(arrays)), np.zeros(len(arrays))
        in_threads(compiled, (arrays, mask.reshape(-1, mask.shape[-1]).contiguous().numpy(), value, size))
        return torch.from_numpy(value).reshape(W.shape[:-2]), torch.from_numpy(size).reshape(W.shape[:-2])
    both = mask.unsqueeze(-1) & mask.unsqueeze(-2)
    terms = torch.where(both, W.to(torch.float64), 0.0).flatten(-2)
    if W.device.type == "cpu":
        return torch.from_numpy(np.asarray(_paired_sum(terms.numpy(), np.zeros))), terms.abs().sum(-1)
    return _paired_sum(terms, terms.new_zeros), terms.abs().sum(-1)


def _paired_sum(terms: Any, zeros: Callable[[tuple[int, ...]], Any]) -> Any:
    """Sums over the last dimension, halves added to each other with what rounding takes off kept beside (TwoSum)."""
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
    return (high + low)[..., 0]


def indices(mask: Tensor, width: int) -> Tensor | None:
    """The places of a mask (B, n) in order, (B, width), padded with -1; None where the compiled pass does not suit."""
    if mask.device.type != "cpu" or mask.dim() != 2 or mask.shape[0] * mask.numel() < COMPILE_FROM:
        return None
    from .cpu import indices as compiled

    found = np.full((len(mask), width), -1, dtype=np.int64)
    compiled(mask.contiguous().numpy(), found)
    return torch.from_numpy(found)


def mask_from_indices(indices: Tensor, n: int) -> Tensor:
    """Bool mask (..., n) of indices (..., k); entries of -1 are padding."""
    mask = torch.zeros(*indices.shape[:-1], n + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, torch.where(indices < 0, n, indices), True)[..., :n]


def _compiled_suits(W: Tensor) -> bool:
    # Smaller ones are done before numba would be imported.
    return W.device.type == "cpu" and W.dtype in (torch.float32, torch.float64) and W.numel() >= COMPILE_FROM
