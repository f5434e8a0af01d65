"""Attention masks over a store and a dense tail: columns of the stored tokens, and what to do with them.

Masks cover the sequence as it was fed in. If tokens were evicted or are stored in another order,
:func:`gather_mask_columns` picks the columns of the stored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import CacheError
from ...kernels.cache.decode.reference import causal_mask as causal_mask
from ..models.attention import check_mask_length
from .store import Store


def gather_mask_columns(attention_mask: Tensor, old: Store, query_heads: int) -> Tensor:
    """Return the columns of a mask ``(B or 1, H_q or 1, L, S)`` for the stored tokens, in their order."""
    if old.positions is None:
        return attention_mask
    positions = old.positions.long()
    batch, heads, count = positions.shape
    if heads > 1:
        positions = positions.repeat_interleave(query_heads // heads, dim=1)
    rows = max(positions.shape[1], attention_mask.shape[1])
    mask = attention_mask.expand(batch, rows, -1, -1)
    older = mask.gather(-1, positions[:, :, None].clamp(min=0).expand(batch, rows, mask.shape[2], count))
    if old.needs_mask:
        never = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        older = older.masked_fill(positions[:, :, None] < 0, never)
    return torch.cat([older, mask[..., old.length :]], dim=-1)


def decoding_mask(module: nn.Module, attention_mask: Tensor, old: Store, tail: int, query_heads: int) -> Tensor:
    """`gather_mask_columns` for a mask of all tokens, for logits in float32."""
    check_mask_covers_cache(module, attention_mask, old, tail)
    return float32_mask(gather_mask_columns(attention_mask, old, query_heads))


def float32_mask(mask: Tensor) -> Tensor:
    """Return a mask for logits in float32.

    A mask says "never" with the smallest number of its type. Next to float32 logits, float16's smallest number is not
    large, so it is replaced by that of float32.
    """
    if mask.dtype == torch.bool or mask.dtype.itemsize >= 4:
        return mask
    return mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min, torch.finfo(torch.float32).min)


def weights_in_sequence(weights: Tensor, old: Store) -> Tensor:
    """Spread weights ``(B, H_q, L, stored)`` over all tokens in their order; tokens not stored get zero."""
    if old.positions is None:
        return weights
    batch, heads, rows, stored = weights.shape
    places = old.positions.long().clamp(min=0)  # what is no token has the weight 0, and is added anywhere
    places = places.repeat_interleave(heads // places.shape[1], dim=1)[:, :, None].expand(batch, heads, rows, -1)
    tail = stored - places.shape[-1]
    older = weights.new_zeros(batch, heads, rows, old.length).scatter_add_(-1, places, weights[..., : stored - tail])
    return torch.cat([older, weights[..., stored - tail :]], dim=-1)


def check_mask_covers_cache(module: nn.Module, attention_mask: Tensor, old: Store, tail: int) -> None:
    """`check_mask_length` for a store and a tail; recognises masks that a model makes from its cache."""
    if attention_mask.dim() == 4 and attention_mask.shape[-1] == tail < old.length + tail:
        raise CacheError(
            f"the attention mask of {type(module).__name__} has {tail} columns, one per dense key, but {old.length} "
            f"older keys are compressed. If you passed no mask, the model makes its own from the keys or values that "
            f"the cache returns, as Doge does: write {old.full_width_instead}, and leave out evict"
        )
    check_mask_length(attention_mask, old.length + tail)
