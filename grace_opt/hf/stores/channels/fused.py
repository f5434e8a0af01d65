"""Decode on pruned keys: by a kernel if one fits and is faster, else by two-segment attention in torch.

The kernel is Triton's on a GPU and a compiled one on the CPU. Both compute what
:func:`grace_opt.hf.stores.channels.attention.pruned_attention` defines; that function runs itself if attention weights,
dropout or gradients are needed, and while ``torch.compile`` is tracing. Kernels read quantised tokens in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ....kernels.cache import decode as kernels
from ..masks import decoding_mask
from ..packed.tokens import QuantizedTokens
from .attention import pruned_attention
from .parts import ChannelParts


def fused_attention(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: ChannelParts,
    want_weights: bool,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of new tokens over the compressed part and the dense tail.

    Parameters
    ----------
    module, query, tail, value, attention_mask, old
        As in :func:`~grace_opt.hf.stores.channels.attention.pruned_attention`.
    want_weights : bool
        Whether the attention weights are needed.
    **kwargs
        Passed on to transformers' attention functions.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``.
    weights : Tensor or None
        ``(B, H_q, L, stored tokens)`` if they were asked for.
    """
    if not want_weights and not kwargs.get("dropout"):
        output = _by_kernel(module, query, tail, value, attention_mask, old, **kwargs)
        if output is not None:
            return output, None
    output, weights = pruned_attention(module, query, tail, value, attention_mask, old, **kwargs)
    return output, weights if want_weights else None


def _by_kernel(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: ChannelParts,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> Tensor | None:
    """Return the output, or None if no kernel fits."""
    few_bits = any(isinstance(part, QuantizedTokens) for part in (old.pruned_keys, old.values))
    if not kernels.worth_a_kernel(query, old.stored + tail.shape[2], few_bits):
        return None
    keys, values = (
        part.packed if isinstance(part, QuantizedTokens) else part for part in (old.pruned_keys, old.values)
    )
    if keys is None or values is None:
        return None
    stored: tuple[Any, ...] = keys, old.sink_keys, tail, values, value
    decode = kernels.kernel_for(query, *stored)
    if decode is None:
        return None
    if attention_mask is not None:
        attention_mask = decoding_mask(module, attention_mask, old, tail.shape[2], query.shape[1])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output: Tensor = decode(
        query, keys, old.kept_indices, old.sink_keys, tail, values, value, attention_mask, scaling, softcap, causal
    )
    return output
