r"""Attention of one new query over a sample of the stored tokens, in torch operations, for any device.

Each query head samples for itself (`hashes`). Tokens of its sample get their exact logits minus :math:`\log u_t`, so
the sums of numerator and denominator are, on average over the hyperplanes, those over all tokens; sinks and tail have
:math:`u = 1`. The bound is on the attention of the tokens that a head has not read, as in `certificate`, but holds at a
stated confidence. Logits are computed in float64.

When: ``by="sampling"``, where `sampled_host` cannot be used. All codes are compared, while MagicPIG looks them up in
tables: this takes many times as long as reading all tokens.

Source: MagicPIG (arXiv 2410.16179), sections 4 and 5; the bound is ours (docs/theory/reading.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gather import gather_channels
from .certificate import unread_bound
from .hashes import HashTables
from .reference import Few, _additive, _for_rows, _take
from .stored import Stored


def attention(
    query: Tensor,
    stored: Stored,
    tables: HashTables,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> Few:
    """Compute attention over sinks, the tokens that are sampled and a dense tail.

    Parameters
    ----------
    query, stored, attention_mask, scaling, softcap
        As in `grace_opt.kernels.cache.reading.reference.attention`.
    tables : HashTables
        Of the old keys.

    Returns
    -------
    Few
        `tokens` counts what any query head of a KV head has sampled: these bytes are read, once. `weights` are those of
        the estimate, `order` and `pages` None.

    Notes
    -----
    Waits for the device once, to know how many tokens to gather.
    """
    keys, kept_indices, sink_keys, tail_keys, old_values, tail_values = stored
    batch, query_heads, _, width = query.shape
    heads, old = keys.shape[1:3]
    group, sinks, wide = query_heads // heads, sink_keys.shape[2], torch.float64
    grouped = query.reshape(batch, heads, group, width).to(wide) * (width**-0.5 if scaling is None else scaling)
    narrow = gather_channels(grouped, kept_indices)
    hidden = _additive(attention_mask, batch, heads, group)
    total = sinks + old + tail_keys.shape[2]

    def capped(logits: Tensor) -> Tensor:
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    sampled, highest = tables.compare(narrow)
    shown = tables.tokens_per_page[:, None, None].to(wide).log()
    if hidden is not None:
        shown = shown + hidden[..., sinks : sinks + old]
    sampled, highest = sampled & (shown > -torch.inf), capped(highest) + shown
    rest = highest.masked_fill(sampled, -torch.inf).logsumexp(-1)

    any_head = sampled.any(2)
    number = any_head.sum(-1)
    most = int(number.max()) if number.numel() else 0
    tokens = any_head.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :most]
    by_row = _for_rows(tokens, group)
    mine = sampled.gather(-1, by_row)
    read_keys = _take(keys, tokens).to(wide)
    logits = capped(narrow @ read_keys.mT) + shown.expand(batch, heads, group, old).gather(-1, by_row)
    logits = logits.masked_fill(~mine, -torch.inf)
    with torch.no_grad():  # how a token was sampled is no function to learn
        weighed = tables.log_probabilities(narrow, read_keys)

    dense = capped(torch.cat([grouped @ sink_keys.to(wide).mT, grouped @ tail_keys.to(wide).mT], dim=-1))
    if hidden is not None:
        dense = dense + torch.cat([hidden[..., :sinks], hidden[..., sinks + old :]], dim=-1)
    around = torch.cat([sink_keys, tail_keys], dim=2).to(wide).abs()
    terms = tables.terms(narrow)
    around_terms = (grouped.abs() @ around.mT).amax(-1) if around.shape[2] else terms * 0
    read = torch.logaddexp(dense.logsumexp(-1), logits.logsumexp(-1))
    precision = torch.finfo(wide).eps
    bound = unread_bound(read, rest, torch.maximum(terms, around_terms), terms, width, total, precision)

    weights = torch.cat([dense, (logits - weighed).masked_fill(~mine, -torch.inf)], dim=-1)
    weights = weights.clamp(min=torch.finfo(wide).min).softmax(-1).to(query.dtype)
    border = dense.shape[-1]
    output = weights[..., :sinks] @ old_values[:, :, :sinks] + weights[..., sinks:border] @ tail_values
    output = output + weights[..., border:] @ _take(old_values[:, :, sinks:], tokens)
    spread = weights.new_zeros(batch, heads, group, total)
    spread[..., :sinks], spread[..., sinks + old :] = weights[..., :sinks], weights[..., sinks:border]
    spread[..., sinks : sinks + old].scatter_(-1, by_row, weights[..., border:])
    return Few(
        output.reshape(batch, query_heads, 1, -1).transpose(1, 2).contiguous(),
        bound.view(batch, query_heads),
        number,
        weights=spread.view(batch, query_heads, 1, total),
    )
