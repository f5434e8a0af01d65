"""Check the compiled f against the reference on a small case."""

from __future__ import annotations

import torch

from ..._shared.cases import draw
from . import reference


def cpu() -> bool:
    """Compare f, its rounding and the sum of the absolute weights, to a few units in the last place of the latter."""
    from . import cpu as compiled

    W, mask = draw(torch.device("cpu"), 3, 37, 37), draw(torch.device("cpu"), 3, 37) < 0
    actual, expected = compiled.sums(W, mask), reference.sums(W, mask)
    allowed = 1e-13 * expected.size
    return all(bool(((one - other).abs() <= allowed).all()) for one, other in zip(actual, expected, strict=True))
