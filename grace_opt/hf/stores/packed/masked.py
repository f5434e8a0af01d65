"""What masked tokens hold, before groups of numbers share a scale."""

from __future__ import annotations

import torch
from torch import Tensor


def with_real_alone(tensor: Tensor, real: Tensor) -> Tensor:
    """Return keys or values in which a masked token has the numbers of the next real one, to be quantised.

    A group's scale would otherwise follow from what padding holds, and a row would differ from the same row alone.

    Parameters
    ----------
    tensor : Tensor
        ``(B, H, n, C)``.
    real : Tensor
        ``(B, 1 or H, n)`` bool, False at masked tokens. Behind the last real one they have its numbers; zeros if none
        is real.
    """
    count = tensor.shape[2]
    place = torch.arange(count, device=real.device)
    ahead = torch.where(real, place, count).flip(-1).cummin(-1).values.flip(-1)
    behind = torch.where(real, place, 0).cummax(-1).values
    found = take(tensor, torch.where(ahead < count, ahead, behind))
    return found.masked_fill(~real.any(-1)[..., None, None], 0)


def take(tensor: Tensor, order: Tensor) -> Tensor:
    """Gather tokens of ``(B, H, S, C)`` in the order ``(B, 1 or H, n)``."""
    index = order.expand(-1, tensor.shape[1], -1)[..., None].expand(-1, -1, -1, tensor.shape[-1])
    return tensor.gather(2, index)
