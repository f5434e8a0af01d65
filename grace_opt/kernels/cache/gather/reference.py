"""Copy the kept channels by torch, for any device."""

from __future__ import annotations

from torch import Tensor


def gather_channels(keys: Tensor, kept_indices: Tensor) -> Tensor:
    """Copy the kept channels ``(B, H, d')`` of keys ``(B, H, S, d)`` to ``(B, H, S, d')``."""
    return keys.gather(-1, kept_indices[:, :, None, :].expand(-1, -1, keys.shape[-2], -1))
