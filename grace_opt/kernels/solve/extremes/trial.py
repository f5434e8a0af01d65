"""Check the compiled extremes of W against the reference on a small case."""

from __future__ import annotations

import torch

from ..._shared.cases import whole_weights
from . import reference


def cpu() -> bool:
    """Compare on a symmetric W, an asymmetric one, and one that is not finite."""
    from . import cpu as compiled

    W = whole_weights(torch.device("cpu"))
    W[1, 3, 20] += 1.0
    W[2, 36, 0] = torch.nan
    actual, expected = compiled.extremes_of(W), reference.extremes(W)
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
