"""The extremes of W in torch operations, for any device: it defines what the compiled pass computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
    wide = W.to(torch.float64)
    finite = wide.isfinite().all(-1).all(-1)
    largest, asymmetry = (one.abs().amax((-1, -2)).masked_fill(~finite, 0.0).cpu() for one in (wide, wide - wide.mT))
    return Extremes(finite.cpu(), largest, asymmetry)
