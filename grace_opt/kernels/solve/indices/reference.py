"""Convert masks to indices and back in torch operations, for any device."""

from __future__ import annotations

import torch
from torch import Tensor


def indices_from_mask(mask: Tensor, width: int) -> Tensor:
    """Return sorted int64 indices (..., width) of a mask (..., n), padded with -1."""
    n = mask.shape[-1]
    place = torch.where(mask, mask.cumsum(-1) - 1, width)  # unchosen vertices go to one spare column
    indices = torch.full((*mask.shape[:-1], width + 1), -1, dtype=torch.int64, device=mask.device)
    indices.scatter_(-1, place, torch.arange(n, device=mask.device).expand(mask.shape))
    return indices[..., :width]


def mask_from_indices(indices: Tensor, n: int) -> Tensor:
    """Return the bool mask (..., n) of indices (..., k); entries of -1 are padding."""
    mask = torch.zeros(*indices.shape[:-1], n + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, torch.where(indices < 0, n, indices), True)[..., :n]
