"""Attention over coded tokens where they lie, if a kernel fits; else the caller makes keys and values dense.

Both compute the same, up to rounding: `grace_opt.hf.stores.coded.coded.CodedTokens.dense` defines the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....kernels.cache import coded as kernels
from ...bases.codebooks import codebook, trellis_codebook
from ..masks import float32_mask
from .bitplanes import unpack_bits
from .parts import CodedParts

#: Added to a logit that must not be seen, in float32.
NEVER = -1e30


def attention_in_place(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: CodedParts,
    scaling: float,
    softcap: float | None = None,
    is_causal: bool | None = None,
    received: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor] | None:
    """Compute attention of new tokens over the coded tokens and the dense tail, and what the newest tokens receive.

    Parameters
    ----------
    module, query, tail, value, old, softcap, is_causal
        As in `grace_opt.hf.stores.channels.attention.pruned_attention`.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, stored)``: columns of the stored tokens.
    scaling : float
        Of the logits.
    received : Tensor or None
        What the first of the newest tokens have received before.
    **others
        Other arguments of the attention function; not all are possible.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``.
    received : Tensor
        ``(B, H, 3, waiting tokens + S_t)``: see `grace_opt.hf.bases.importance.tail_attention`; with what was before.
    """
    if others.get("s_aux") is not None or others.get("position_bias") is not None:
        return None
    if others.get("dropout") and module.training:
        return None
    attend = kernels.kernel_for(query, tail, value, old.coded)
    hides = any(row.hidden for row in old.rows)
    if attend is None or (hides and softcap is not None):  # of which nothing is too small to be seen
        return None
    recent = None
    if attention_mask is not None:
        older, recent = attention_mask[..., : old.stored], float32_mask(attention_mask[..., old.stored :])
        if not all_seen(older, old):
            return None
    waiting, trellis, added = old.waiting, old.trellis, left_out(query, tail, old)
    if hides:
        added = _hiding(query, tail, old, added)
    found: tuple[Tensor, Tensor] = attend(
        query,
        [row.sequence(old.bases, old.columns(number), added is not None) for number, row in enumerate(old.rows)],
        tail,
        value,
        (trellis_codebook if trellis else codebook)(query.device),
        waiting + tail.shape[2],
        [waiting - row.waits for row in old.rows],  # without codes, tokens that others have waiting are dense
        recent,
        scaling,
        softcap,
        getattr(module, "is_causal", True) if is_causal is None else is_causal,
        received,
        trellis,
        added,
    )
    return found


def left_out(query: Tensor, tail: Tensor, old: CodedParts) -> Tensor | None:
    """Return the products of queries with what the codes of keys leave out at each position; None if that is nothing.

    Returns
    -------
    Tensor or None
        ``(B, H, group times new tokens, positions)`` float32.
    """
    rotary = None if old.bases is None else old.bases[0].rotary
    if rotary is None or all(row.gain is None for row in old.rows):
        return None
    own = query.reshape(len(query), tail.shape[1], -1, query.shape[-1])
    means = [row.left_out(rotary) for row in old.rows]
    if query.is_cpu:
        every = means[0][None] if len(means) == 1 else torch.stack(means)
        return kernels.turned_products(own.float(), every, rotary.channels, *rotary.tables(old.length), old.length)
    return torch.stack([rotary.logits(each, mean, old.length) for each, mean in zip(own, means, strict=True)])


def _hiding(query: Tensor, tail: Tensor, old: CodedParts, added: Tensor | None) -> Tensor:
    """Return what is added by position, with one more position, at which no logit is seen."""
    if added is None:
        heads = tail.shape[1]
        shape = len(query), heads, query.shape[1] // heads * query.shape[2], old.length
        added = query.new_zeros(shape, dtype=torch.float32)
    return functional.pad(added, (0, 1), value=NEVER)


def all_seen(older: Tensor, old: CodedParts) -> bool:
    """Return whether a mask shows every stored token; padding is not stored."""
    seen = older if older.dtype == torch.bool else older == 0
    if all(row.present is None for row in old.rows):
        return bool(seen.all())
    padded = [
        torch.zeros(old.stored, dtype=torch.bool, device=older.device)
        if row.present is None
        else ~unpack_bits(row.present, row.length).bool()
        for row in old.rows
    ]
    return bool((seen | torch.stack(padded)[:, None, None]).all())
