"""Attention on pruned keys: two segments of keys, one softmax.

:mod:`grace_opt.kernels.cache.decode.reference` computes it, with logits in float32 or float64; here is what it needs
from a layer's storage. The result equals attention on keys with zeros in the pruned channels, as
:func:`scatter_channels` makes them.

Masks cover the sequence as it was fed in. If tokens were evicted or are stored in another order,
:func:`gather_mask_columns` picks the columns of the stored tokens.

Source: ThinK (arXiv 2407.21018) decodes on two segments; this version is batched and prunes per KV head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....errors import CacheError
from ....kernels.cache.decode.reference import attention
from ...models.attention import check_mask_length
from ..coded.coded import CodedTokens
from .by_heads import ByHeads
from .storage import Compressed, dequantized


def pruned_attention(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: Compressed,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention over the compressed part and the dense tail with one softmax.

    Parameters
    ----------
    module : Module
        The model's attention module; gives ``is_causal`` if the argument is None.
    query : Tensor
        ``(B, H_q, L, d)``, post-RoPE.
    tail, value : Tensor
        ``(B, H, S_t, d)`` and ``(B, H, S_t, d_v)``.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, S)``, bool (True attends) or additive, for all tokens that were fed in; None means
        causal, without padding.
    old : Compressed
        The older tokens.
    scaling, dropout, softcap, is_causal
        As in transformers' attention functions.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``.
    weights : Tensor
        ``(B, H_q, L, stored tokens)``.
    """
    if attention_mask is not None:
        attention_mask = decoding_mask(module, attention_mask, old, tail.shape[2], query.shape[1])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return attention(
        query,
        dequantized(old.pruned_keys),
        old.kept_indices,
        old.sink_keys,
        tail,
        dequantized(old.values),
        value,
        attention_mask,
        scaling,
        softcap,
        causal,
        dropout if module.training else 0.0,
    )


def scatter_channels(
    old: Compressed | ByHeads | CodedTokens | None, tail: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys of full width, with zeros in the pruned channels, and all values.

    A head that stores fewer tokens than another begins with zeros, which `gather_mask_columns` hides.

    Parameters
    ----------
    old : Compressed, ByHeads, CodedTokens or None
        The older tokens; None before compression.
    tail, value : Tensor
        ``(B, H, S_t, d)`` and ``(B, H, S_t, d_v)``.

    Returns
    -------
    keys, values : Tensor
        ``(B, H, stored tokens, d)`` and ``(B, H, stored tokens, d_v)``.
    """
    if old is None:
        return tail, value
    if isinstance(old, CodedTokens):
        return old.full_width(tail, value)
    if isinstance(old, ByHeads):
        rows = [
            [functional.pad(part, (0, 0, old.stored - group.stored, 0)) for part in scatter_channels(group, *newer)]
            for group, heads in old.by_heads()
            for newer in [(tail[:, heads], value[:, heads])]
        ]
        keys, values = (torch.cat(part, dim=1) for part in zip(*rows, strict=True))
        return keys, values
    pruned = dequantized(old.pruned_keys)
    sinks, border = old.sink_keys.shape[2], old.stored
    full = tail.new_zeros(*tail.shape[:2], border + tail.shape[2], tail.shape[3])
    full[:, :, :sinks] = old.sink_keys
    index = old.kept_indices[:, :, None, :].expand(-1, -1, pruned.shape[2], -1)
    full[:, :, sinks:border].scatter_(-1, index, pruned)
    full[:, :, border:] = tail
    return full, torch.cat([dequantized(old.values), value], dim=2)


def gather_mask_columns(attention_mask: Tensor, old: Compressed | ByHeads | CodedTokens, query_heads: int) -> Tensor:
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
    if isinstance(old, ByHeads):
        never = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        older = older.masked_fill(positions[:, :, None] < 0, never)
    return torch.cat([older, mask[..., old.length :]], dim=-1)


def decoding_mask(module: nn.Module, attention_mask: Tensor, old: Compressed, tail: int, query_heads: int) -> Tensor:
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


def weights_in_sequence(weights: Tensor, old: Compressed | ByHeads | CodedTokens) -> Tensor:
    """Spread weights ``(B, H_q, L, stored)`` over all tokens in their order; tokens not stored get zero."""
    if old.positions is None:
        return weights
    batch, heads, rows, stored = weights.shape
    places = old.positions.long().clamp(min=0)  # what is no token has the weight 0, and is added anywhere
    places = places.repeat_interleave(heads // places.shape[1], dim=1)[:, :, None].expand(batch, heads, rows, -1)
    tail = stored - places.shape[-1]
    older = weights.new_zeros(batch, heads, rows, old.length).scatter_add_(-1, places, weights[..., : stored - tail])
    return torch.cat([older, weights[..., stored - tail :]], dim=-1)


def check_mask_covers_cache(
    module: nn.Module, attention_mask: Tensor, old: Compressed | ByHeads | CodedTokens, tail: int
) -> None:
    """`check_mask_length` for a compressed part and a tail; recognises masks that a model makes from its cache."""
    if attention_mask.dim() == 4 and attention_mask.shape[-1] == tail < old.length + tail:
        instead = "ratio= and fused=False in place of bits=" if isinstance(old, CodedTokens) else "fused=False"
        raise CacheError(
            f"the attention mask of {type(module).__name__} has {tail} columns, one per dense key, but {old.length} "
            f"older keys are compressed. If you passed no mask, the model makes its own from the keys or values that "
            f"the cache returns, as Doge does: write {instead}, and leave out evict"
        )
    check_mask_length(attention_mask, old.length + tail)
