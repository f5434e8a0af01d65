"""Masks and the channels that a cache stores: indices of those that are kept, checked against the keys, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from ....attention.masks import ChannelMask
from ....errors import MaskError


def kept_channels(mask: ChannelMask, keys: Tensor) -> Tensor:
    """Return the indices of the kept channels as the cache stores them, after checking that they fit the keys.

    Parameters
    ----------
    mask : ChannelMask
        What a mask source returned for these keys.
    keys : Tensor
        ``(B, H, S, d)``.

    Returns
    -------
    Tensor
        ``(B, H, d')`` int64, sorted, on the keys' device, owning its memory.
    """
    expected = (keys.shape[0], keys.shape[1], keys.shape[3])
    found = tuple(mask.pruned.shape) if isinstance(mask, ChannelMask) else type(mask).__name__
    if found != expected:
        raise MaskError(
            f"the mask source returned {found} for keys with (batch, KV heads, head_dim) = {expected}; it must "
            f"return a ChannelMask with an entry per sequence, KV head and channel"
        )
    if mask.pruned_per_head is None:
        mask = mask.counted()
    if mask.pruned_per_head is None:
        counts = sorted(set((~mask.pruned).sum(-1).flatten().tolist()))
        raise MaskError(
            f"the mask keeps between {counts[0]} and {counts[-1]} channels per KV head, but this cache needs the "
            f"same number in all heads of a layer; give a mask that keeps equally many in every head"
        )
    # Not mask.kept_indices: if the numbers were not finite, a mask may keep another number of channels than it says,
    # and an index out of range destroys a GPU's context. Sorting gives valid indices; check_numbers reports the cause.
    kept = (~mask.pruned).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return (
        kept[..., : mask.head_dim - mask.pruned_per_head].to(keys.device).clone(memory_format=torch.contiguous_format)
    )


def mask_from_kept(kept_indices: Tensor, head_dim: int) -> ChannelMask:
    """Return the mask that keeps exactly these channels; inverse of :func:`kept_channels`.

    Parameters
    ----------
    kept_indices : Tensor
        ``(B, H, d')`` int64.
    head_dim : int
        Width ``d`` of a dense head.
    """
    kept = kept_indices.cpu()
    pruned = torch.ones(*kept.shape[:-1], head_dim, dtype=torch.bool, device="cpu")
    return ChannelMask(pruned.scatter_(-1, kept, False), pruned_per_head=head_dim - kept.shape[-1])
