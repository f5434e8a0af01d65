"""Check that compiled completions equal the reference's, bit for bit, on a small case."""

from __future__ import annotations

import torch

from ..._shared.cases import whole_weights
from . import reference


def cpu() -> bool:
    """Compare order and cost of one partial set per instance."""
    from . import cpu as compiled

    W = whole_weights(torch.device("cpu"))
    case = (
        W,
        torch.arange(3, device="cpu"),
        W.diagonal(dim1=-2, dim2=-1).clone(),
        torch.tensor([0, 9, 37], dtype=torch.int64, device="cpu"),
        37,
    )
    actual, expected = compiled.completions(*case), reference.completions(*case)
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
