r"""Attention of new queries over sinks, pruned keys and a dense tail, in torch operations, for any device.

For a query row :math:`q`, kept channels :math:`C`, dense keys :math:`K_s` of the sink tokens, pruned keys :math:`K_p`
of the old tokens and the dense tail :math:`K_t`:

.. math:: o = \operatorname{softmax}\bigl(s\,[\,q K_s^\top \mid q_C K_p^\top \mid q K_t^\top\,] + m\bigr)\, V

with logits in float32 (or float64): half-precision queries and keys are multiplied in float32, as in sdpa, because
:math:`q k` alone may leave float16 where :math:`s\,q k` is small. The queries of a group share the keys of their KV
head; nothing is repeated.

Source: ThinK (arXiv 2407.21018) decodes on two regions; this version is batched and prunes per KV head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..gather import gather_channels


def attention(
    query: Tensor,
    pruned_keys: Tensor,
    kept_indices: Tensor,
    sink_keys: Tensor,
    tail_keys: Tensor,
    old_values: Tensor,
    tail_values: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return output ``(B, L, H_q, d_v)`` and weights ``(B, H_q, L, stored tokens)`` for dense keys and values.

    Parameters
    ----------
    query : Tensor
        ``(B, H_q, L, d)``, of any floating type, as keys and values.
    pruned_keys : Tensor
        ``(B, H, S_p, d')``.
    kept_indices : Tensor
        ``(B, H, d')`` int64.
    sink_keys, tail_keys : Tensor
        ``(B, H, s, d)`` and ``(B, H, S_t, d)``.
    old_values, tail_values : Tensor
        ``(B, H, s + S_p, d_v)`` and ``(B, H, S_t, d_v)``.
    attention_mask, scaling, softcap, causal
        As for `grace_opt.kernels.cache.decode.host.decode_attention`.
    dropout : float
        The share of weights that become zero.
    """
    batch, query_heads, length, head_dim = query.shape
    heads, stored = tail_keys.shape[1], old_values.shape[2]
    rows = query_heads // heads * length
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(batch, heads, rows, head_dim).to(wide)
    parts = [gather_channels(grouped, kept_indices) @ pruned_keys.to(wide).mT, grouped @ tail_keys.to(wide).mT]
    if sink_keys.shape[2]:
        parts.insert(0, grouped @ sink_keys.to(wide).mT)
    logits = torch.cat(parts, dim=-1).view(batch, query_heads, length, -1)
    logits = logits * (head_dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if attention_mask is None and causal and length > 1:
        attention_mask = causal_mask(length, logits.shape[-1], logits.device)
    if attention_mask is not None:
        logits = _masked(logits, attention_mask)
    weights = torch.softmax(logits, dim=-1).to(query.dtype)
    if dropout:
        weights = functional.dropout(weights, p=dropout)
    grouped_weights = weights.view(batch, heads, rows, -1)
    output = grouped_weights[..., :stored] @ old_values + grouped_weights[..., stored:] @ tail_values
    output = output.view(batch, query_heads, length, -1)
    return output.transpose(1, 2).contiguous(), weights


def causal_mask(length: int, total: int, device: torch.device) -> Tensor:
    """Return ``(1, 1, length, total)`` bool: each of the last positions attends to itself and those before it."""
    return torch.ones(length, total, dtype=torch.bool, device=device).tril(total - length)[None, None]


def _masked(logits: Tensor, attention_mask: Tensor) -> Tensor:
    # The smallest number instead of -inf: a row that sees nothing stays finite.
    if attention_mask.dtype == torch.bool:
        return logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    return logits + attention_mask
