r"""Attention of one new query over few of the stored tokens, in torch operations, for any device.

Pages are ordered by their scores: of each query head relative to its own sum over all pages, the largest in
the group of a KV head. The first ones are read; of the others, only bounds are known. Logits are computed in float64,
so that nothing a matrix library does to float32 can make a bound wrong.

With an `epsilon`, logits of all tokens are computed here, to see how many pages are needed; only what is read counts in
the output. The compiled loop stops as soon as it has read enough.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..gather import gather_channels
from .certificate import unread_bound
from .forms import BUCKETS, HIDDEN, ROUNDS, STEPS
from .pages import PageScores
from .stored import Stored


class Few(NamedTuple):
    """What attention over few tokens gives.

    Attributes
    ----------
    output : Tensor
        ``(B, 1, H_q, d_v)``.
    bound : Tensor
        ``(B, H_q)`` float64: the largest possible share of the attention on tokens that were not read.
    tokens : Tensor
        ``(B, H)`` int64: number of real tokens that were read of the pages.
    order, pages : Tensor or None
        ``(B, H, P)`` and ``(B, H)``: the pages in the order of reading, and how many were read; of the reference only.
    weights : Tensor or None
        ``(B, H_q, 1, stored tokens)``: the attention, with zeros where nothing was read; of the reference only.
    """

    output: Tensor
    bound: Tensor
    tokens: Tensor
    order: Tensor | None = None
    pages: Tensor | None = None
    weights: Tensor | None = None


def attention(
    query: Tensor,
    stored: Stored,
    pages: PageScores,
    least: Tensor,
    most: int,
    epsilon: float | None = None,
    top_p: float | None = None,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> Few:
    """Compute attention over sinks, the pages that are read and a dense tail.

    Parameters
    ----------
    query : Tensor
        ``(B, H_q, 1, d)``.
    stored : Stored
    pages : PageScores
        What its old tokens are read by.
    least : Tensor
        ``(B,)`` int64: number of pages to read at least.
    most : int
        No row of `least` is larger.
    epsilon : float, optional
        Read on until the bound is no more than this for every query head.
    top_p : float, optional
        Read on until this share of the attention is expected on what is read, for every query head.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, 1, stored tokens)``, bool (True attends) or additive; None hides nothing.
    scaling, softcap : float, optional
        As in `grace_opt.kernels.cache.decode.host.decode_attention`.
    """
    keys, kept_indices, sink_keys, tail_keys, old_values, tail_values = stored
    batch, query_heads, _, width = query.shape
    heads, old = keys.shape[1:3]
    group, sinks, wide = query_heads // heads, sink_keys.shape[2], torch.float64
    grouped = query.reshape(batch, heads, group, width).to(wide) * (width**-0.5 if scaling is None else scaling)
    narrow = gather_channels(grouped, kept_indices)
    hidden = _additive(attention_mask, batch, heads, group)
    inner = None if hidden is None else hidden[..., sinks : sinks + old]
    total = sinks + old + tail_keys.shape[2]

    def capped(logits: Tensor) -> Tensor:
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    expected, bounds, terms = pages.estimates(narrow, keys)
    starts, stops = page_ends(pages, old, keys.device)
    expected, bounds = pages.summed(capped(expected)), pages.summed(capped(bounds))
    if inner is not None:  # no token of a page is hidden less than the one that is hidden least
        shown = inner if pages.size == 1 else _largest_of_pages(inner, len(stops), pages.first, pages.size)
        expected, bounds = expected + shown, bounds + shown
    order = reading_order(expected)

    dense = torch.cat([grouped @ sink_keys.to(wide).mT, grouped @ tail_keys.to(wide).mT], dim=-1)
    dense = capped(dense)
    if hidden is not None:
        dense = dense + torch.cat([hidden[..., :sinks], hidden[..., sinks + old :]], dim=-1)
    around = torch.cat([sink_keys, tail_keys], dim=2).to(wide).abs()
    around_terms = (grouped.abs() @ around.mT).amax(-1) if around.shape[2] else terms * 0
    all_read = dense.logsumexp(-1)  # so far

    count = least[:, None].expand(batch, heads).clamp(max=pages.count)
    most_pages = min(most, pages.count) if epsilon is None and top_p is None else pages.count
    reading = order[..., :most_pages]
    tokens = starts[reading][..., None] + torch.arange(pages.size, device=keys.device)  # (B, H, k, size)
    exists = tokens < stops[reading][..., None]
    tokens = tokens.clamp(max=max(old - 1, 0)).flatten(2)
    if top_p is not None:
        count = _expected_enough(expected, order, all_read, top_p, count)
    read_keys = _take(keys, tokens).to(wide)
    logits = capped(narrow @ read_keys.mT)  # (B, H, g, k * size)
    if inner is not None:
        logits = logits + inner.expand(batch, heads, group, old).gather(-1, _for_rows(tokens, group))
    logits = logits.masked_fill(~exists.flatten(2)[:, :, None], -torch.inf)
    of_pages = logits.reshape(batch, heads, group, most_pages, pages.size).logsumexp(-1)
    in_order = bounds.gather(-1, _for_rows(order, group))
    precision = torch.finfo(wide).eps
    if epsilon is not None:
        behind = torch.cat(
            [in_order.flip(-1).logcumsumexp(-1).flip(-1), torch.full_like(all_read, -torch.inf)[..., None]], -1
        )
        ahead = torch.cat([all_read[..., None], torch.logaddexp(all_read[..., None], of_pages.logcumsumexp(-1))], -1)
        certain = unread_bound(
            ahead, behind, torch.maximum(terms, around_terms)[..., None], terms[..., None], width, total, precision
        )
        count = _certain_enough(certain.amax(2), count, pages_at_a_time(pages), epsilon)
    place = torch.arange(most_pages, device=keys.device)
    is_read = place < count[..., None]  # (B, H, k)
    rows = torch.arange(pages.count, device=keys.device) < count[..., None]
    rest = in_order.masked_fill(rows[:, :, None], -torch.inf).logsumexp(-1)
    of_pages = of_pages.masked_fill(~is_read[:, :, None], -torch.inf)
    read = torch.logaddexp(all_read, of_pages.logsumexp(-1))
    bound = unread_bound(read, rest, torch.maximum(terms, around_terms), terms, width, total, precision)
    logits = logits.masked_fill(~is_read.repeat_interleave(pages.size, -1)[:, :, None], -torch.inf)

    least_number = torch.finfo(wide).min
    weights = torch.cat([dense, logits], dim=-1).clamp(min=least_number).softmax(-1).to(query.dtype)
    border, ends = dense.shape[-1], sinks
    output = weights[..., :ends] @ old_values[:, :, :sinks] + weights[..., ends:border] @ tail_values
    output = output + weights[..., border:] @ _take(old_values[:, :, sinks:], tokens)
    spread = weights.new_zeros(batch, heads, group, total)
    spread[..., :sinks], spread[..., sinks + old :] = weights[..., :ends], weights[..., ends:border]
    spread[..., sinks : sinks + old].scatter_add_(-1, _for_rows(tokens, group), weights[..., border:])
    counted = pages.tokens_per_page[:, None].expand(batch, heads, -1).gather(-1, order)
    return Few(
        output.reshape(batch, query_heads, 1, -1).transpose(1, 2).contiguous(),
        bound.view(batch, query_heads),
        (counted * rows).sum(-1),
        order,
        count,
        spread.view(batch, query_heads, 1, total),
    )


def page_ends(pages: PageScores, old: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first token of each page, and the one behind its last, ``(P,)`` each."""
    stops = (torch.arange(pages.count, device=device) * pages.size + pages.first).clamp(max=old)
    starts = torch.cat([stops.new_zeros(1), stops])[: len(stops)]
    return starts, stops


def reading_order(scores: Tensor) -> Tensor:
    """Return the pages ``(B, H, P)`` in the order in which they are read, from scores ``(B, H, g, P)``.

    Scores that are not numbers come first, those of what nobody may see last; equal ones in the order of the tokens.
    """
    if scores.shape[2] > 1:
        scores = scores - scores.logsumexp(-1, keepdim=True)
    best = torch.where(scores.isnan(), torch.inf, scores).amax(2)
    below = ((best.amax(-1, keepdim=True) - best) * STEPS).nan_to_num(nan=0.0, posinf=BUCKETS).floor()
    ranks = below.clamp(max=HIDDEN - 1).masked_fill(best == -torch.inf, HIDDEN)
    return ranks.argsort(dim=-1, stable=True)


def _expected_enough(expected: Tensor, order: Tensor, dense: Tensor, top_p: float, least: Tensor) -> Tensor:
    """Return how many pages have a share `top_p` of the attention that is expected, with the dense tokens."""
    whole = torch.logaddexp(dense, expected.logsumexp(-1))
    shares = (expected - whole[..., None]).exp().nan_to_num(nan=0.0)
    read = shares.gather(-1, _for_rows(order, expected.shape[2])).cumsum(-1)
    needed = shares.sum(-1, keepdim=True) - (1 - top_p)
    lacking = ((read < needed).sum(-1) + (needed[..., 0] > 0)).amax(2)
    return torch.maximum(least, lacking.clamp(max=order.shape[-1]))


def pages_at_a_time(pages: PageScores) -> Tensor:
    """Return how many pages more a row reads at a time, ``(B,)``: a padded row as many as it would alone."""
    real = (pages.tokens_per_page > 0).sum(-1)
    return (real + ROUNDS - 1) // ROUNDS


def _certain_enough(certain: Tensor, least: Tensor, step: Tensor, epsilon: float) -> Tensor:
    """Return the first of `ROUNDS` numbers of pages, from `least` on, whose bounds ``(B, H, P + 1)`` suffice."""
    rounds = torch.arange(ROUNDS + 1, device=certain.device) * step[:, None, None]
    places = (least[..., None] + rounds).clamp(max=certain.shape[-1] - 1)
    enough = certain.gather(-1, places) <= epsilon
    enough[..., -1] = True
    return places.gather(-1, enough.to(torch.uint8).argmax(-1, keepdim=True))[..., 0]


def _additive(mask: Tensor | None, batch: int, heads: int, group: int) -> Tensor | None:
    """Return a mask in float64 by KV head, ``(B, H, g, S)``; minus infinity says "never"."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        additive = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_fill(~mask, -torch.inf)
    else:  # the smallest number of its type stands for never
        additive = mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    additive = additive[:, :, 0].expand(batch, heads * group if mask.shape[1] > 1 else 1, -1)
    return (
        additive.view(batch, heads, group, -1)
        if mask.shape[1] > 1
        else additive[:, :, None].expand(batch, heads, group, -1)
    )


def _largest_of_pages(mask: Tensor, count: int, first: int, size: int) -> Tensor:
    """Return the largest number of a mask ``(B, H, g, S)`` in each page, ``(B, H, g, P)``."""
    before = size - first
    padded = functional.pad(mask, (before, count * size - before - mask.shape[-1]), value=-torch.inf)
    return padded.view(*mask.shape[:3], count, size).amax(-1)


def _take(stored: Tensor, tokens: Tensor) -> Tensor:
    """Gather tokens ``(B, H, n)`` of ``(B, H, S, C)``."""
    return stored.gather(2, tokens[..., None].expand(-1, -1, -1, stored.shape[-1]))


def _for_rows(index: Tensor, group: int) -> Tensor:
    return index[:, :, None].expand(-1, -1, group, -1)
