"""Attention on pruned keys: two segments of keys, one softmax.

:mod:`grace_opt.kernels.cache.decode.reference` computes it, with logits in float32 or float64; here is what it needs
from a layer's storage. The result equals attention on keys with zeros in the pruned channels, as
:func:`scatter_channels` makes them.

Source: ThinK (arXiv 2407.21018) decodes on two segments; this version is batched and prunes per KV head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.cache.decode.reference import attention
from ..masks import decoding_mask
from ..packed.tokens import dequantized
from .parts import ChannelParts


def pruned_attention(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: ChannelParts,
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
    old : ChannelParts
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


def scatter_channels(old: ChannelParts, tail: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys of full width, with zeros in the pruned channels, and all values.

    Parameters
    ----------
    old : ChannelParts
        The older tokens.
    tail, value : Tensor
        ``(B, H, S_t, d)`` and ``(B, H, S_t, d_v)``.

    Returns
    -------
    keys, values : Tensor
        ``(B, H, stored tokens, d)`` and ``(B, H, stored tokens, d_v)``.
    """
    pruned = dequantized(old.pruned_keys)
    sinks, border = old.sink_keys.shape[2], old.stored
    full = tail.new_zeros(*tail.shape[:2], border + tail.shape[2], tail.shape[3])
    full[:, :, :sinks] = old.sink_keys
    index = old.kept_indices[:, :, None, :].expand(-1, -1, pruned.shape[2], -1)
    full[:, :, sinks:border].scatter_(-1, index, pruned)
    full[:, :, border:] = tail
    return full, torch.cat([dequantized(old.values), value], dim=2)
