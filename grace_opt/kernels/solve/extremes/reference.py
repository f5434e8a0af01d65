"""The extremes of W in torch operations, for any device: the definition of the compiled pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Extremes(NamedTuple):
    """What is checked of W before it is used, per instance, on the CPU.

    Attributes
    ----------
    finite : Tensor (...), bool
        Whether every entry is finite.
    largest, asymmetry : Tensor (...), float64
        max |W_ij| and max |W_ij - W_ji|, the latter infinite if it overflows float64; 0 if not all entries are finite.
    """

    finite: Tensor
    largest: Tensor
    asymmetry: Tensor


def extremes(W: Tensor) -> Extremes:
    """Return per instance of W (..., n, n): finite or not, the largest absolute entry, the deviation from symmetry."""
    wide = W.to(torch.float64)
    finite = wide.isfinite().all(-1).all(-1)
    largest, asymmetry = (one.abs().amax((-1, -2)).masked_fill(~finite, 0.0).cpu() for one in (wide, wide - wide.mT))
    return Extremes(finite.cpu(), largest, asymmetry)
