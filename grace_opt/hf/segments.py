r"""Two segments of keys, one softmax: the arithmetic of decoding on pruned keys.

For a query row :math:`q`, kept channels :math:`C`, pruned keys :math:`K_p` of the old tokens and the dense tail
:math:`K_t`:

.. math:: o = \operatorname{softmax}\bigl(s\,[\,q_C K_p^\top \mid q K_t^\top\,] + m\bigr)\, V

in float32 (or float64) from the logits on. The queries of a group share their KV head's keys without repeating them.
It equals attention on keys whose pruned channels are zero, which is what :func:`zero_filled` makes.

Source: ThinK (arXiv 2407.21018) decodes on these two segments; per KV head and batched here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CacheError

if TYPE_CHECKING:
    from .layer import PrunedKeyLayer

# The attribute by which a key tensor carries its Handoff from the cache's update to the attention function.
_ATTRIBUTE = "_grace_handoff"


class Handoff(NamedTuple):
    """What ``update`` pins to the keys that it returns.

    The tensors stand here, besides the layer, because an offloading cache moves the layer's own ones away between
    ``update`` and the attention.
    """

    layer: PrunedKeyLayer
    pruned_keys: Tensor | None
    kept_indices: Tensor | None


def pin(keys: Tensor, handoff: Handoff) -> Tensor:
    """A view of the keys that carries the hand-off; a view, so that the stored tensor itself never does."""
    view = keys.view_as(keys)
    setattr(view, _ATTRIBUTE, handoff)
    return view


def pinned(keys: Tensor) -> Handoff | None:
    """The hand-off that these keys carry, or None."""
    return getattr(keys, _ATTRIBUTE, None)


def segmented_attention(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    handoff: Handoff,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention over a pruned segment and a dense tail with one softmax.

    Parameters
    ----------
    module : Module
        The model's attention module; asked for ``is_causal`` where the keyword does not say.
    query : Tensor
        ``(B, H_q, L, d)``, post-RoPE.
    tail, value : Tensor
        ``(B, H, S_t, d)`` and ``(B, H, S, d_v)``.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, S)``, bool (True attends) or additive; None means causal, nothing padded.
    handoff : Handoff
        Carries the pruned segment.
    scaling, dropout, softcap, is_causal
        As in transformers' attention functions.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``.
    weights : Tensor
        ``(B, H_q, L, S)``.
    """
    pruned, kept = handoff.pruned_keys, handoff.kept_indices
    if pruned is None or kept is None:
        raise CacheError("there is no pruned segment yet; run the model on a prompt of several tokens first")
    batch, query_heads, length, head_dim = query.shape
    heads = tail.shape[1]
    rows = query_heads // heads * length
    grouped = query.reshape(batch, heads, rows, head_dim)
    narrowed = grouped.gather(-1, kept[:, :, None, :].expand(-1, -1, rows, -1))
    logits = torch.cat([narrowed @ pruned.transpose(-1, -2), grouped @ tail.transpose(-1, -2)], dim=-1)
    logits = logits.view(batch, query_heads, length, -1).to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits * (head_dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if attention_mask is None and length > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = causal_mask(length, logits.shape[-1], logits.device) if causal else None
    if attention_mask is not None:
        logits = _masked(logits, attention_mask)
    weights = torch.softmax(logits, dim=-1).to(query.dtype)
    if dropout:
        weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    output = (weights.view(batch, heads, rows, -1) @ value).view(batch, query_heads, length, -1)
    return output.transpose(1, 2).contiguous(), weights


def causal_mask(length: int, total: int, device: torch.device) -> Tensor:
    """``(1, 1, length, total)`` bool: each of the last ``length`` positions attends to itself and those before it."""
    return torch.ones(length, total, dtype=torch.bool, device=device).tril(total - length)[None, None]


def zero_filled(pruned_keys: Tensor | None, kept_indices: Tensor | None, tail: Tensor) -> Tensor:
    """Keys of full width: the pruned segment with zeros in the channels that it lacks, then the tail.

    Parameters
    ----------
    pruned_keys, kept_indices : Tensor or None
        ``(B, H, S_p, d')`` and ``(B, H, d')``; None before compression.
    tail : Tensor
        ``(B, H, S_t, d)``.

    Returns
    -------
    Tensor
        ``(B, H, S_p + S_t, d)``.
    """
    if pruned_keys is None or kept_indices is None:
        return tail
    batch, heads, length, _ = pruned_keys.shape
    full = tail.new_zeros(batch, heads, length + tail.shape[2], tail.shape[3])
    full[:, :, :length].scatter_(-1, kept_indices[:, :, None, :].expand(-1, -1, length, -1), pruned_keys)
    full[:, :, length:] = tail
    return full


def check_covers(attention_mask: Tensor, length: int) -> None:
    """Raise unless a mask is ``(..., ..., ..., length)``: one of the new tokens alone would be broadcast, silently."""
    if attention_mask.dim() != 4 or attention_mask.shape[-1] != length:
        raise CacheError(
            f"the attention mask has shape {tuple(attention_mask.shape)} for {length} tokens, cached and new; write a "
            f"mask (batch, {length}) that covers the whole cache, or a 4-D one (batch, 1, new tokens, {length})"
        )


def _masked(logits: Tensor, attention_mask: Tensor) -> Tensor:
    check_covers(attention_mask, logits.shape[-1])
    # The smallest number instead of -inf: a row that sees nothing stays finite.
    if attention_mask.dtype == torch.bool:
        return logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    return logits + attention_mask
