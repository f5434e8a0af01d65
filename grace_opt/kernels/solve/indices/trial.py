"""Check that compiled indices equal the reference's on a small case."""

from __future__ import annotations

import torch

from ..._shared.cases import draw
from . import reference


def cpu() -> bool:
    """Compare on masks of several sizes, padded."""
    from . import cpu as compiled

    mask = draw(torch.device("cpu"), 3, 37) < 0
    return torch.equal(compiled.indices_from_mask(mask, 37), reference.indices_from_mask(mask, 37))
