"""Check Triton's kernel against the reference, in both layouts."""

from __future__ import annotations

import torch

from ..._shared.cases import draw
from .reference import gather_channels


def gpu(device: torch.device) -> bool:
    """Compare the copied numbers in both layouts."""
    from . import gpu as on_chip

    keys = draw(device, 2, 2, 300, 40).mT.contiguous().mT
    kept_indices = torch.arange(3, 40, 3, device=device).expand(2, 2, -1)
    expected = gather_channels(keys, kept_indices)
    return all(
        torch.equal(on_chip.gather_channels(keys, kept_indices, channel_major), expected)
        for channel_major in (False, True)
    )
