"""How much each token matters: the attention that it receives from queries of the prompt.

Three sets of queries are averaged: the last 32, the last 128, and every eighth of all. In longer prompts, for time, it
is every sixteenth, and beyond the last 32 one head of each group asks, in turn, for all of them. An error in a token's
key changes its logit, and counts by the attention p that it receives; an error in its value changes the output
directly, and counts by p².

Source: SnapKV (arXiv 2404.14469) for the last queries, H2O (arXiv 2306.14048) for all.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..._util.arrays import to_device
from ...kernels.cache.received import attention_received
from ..models.observation import Observation
from ..settings.bits import LAST

#: Distance between queries of the third set, the first token's among them: it attends to tokens that others overlook.
STRIDE = 16
#: Distance between queries that are kept: which directions they have is told from more of them than are asked.
KEPT = 8
#: Prompts of fewer tokens ask with all heads, and with all queries that are kept: these are few.
LONG = 512
#: Largest number of attention weights at once.
MAX_WEIGHTS = 2**22
#: The same for a prompt that is not on the CPU, where every operation has to be started: 128 MiB, twice.
MAX_WEIGHTS_ELSEWHERE = 2**25
#: Number of a layer's key elements for each attention weight that is held at once.
KEYS_PER_WEIGHT = 8
#: Number of new queries, at most, that are one block whatever the number of keys is.
FEW = 32


@functools.lru_cache(maxsize=8)  # all layers ask for the same
def observed_queries(count: int) -> Tensor:
    """Return how much each query of a prompt of `count` tokens counts, ``(count,)`` float64; most not at all.

    On the CPU. Not to be written to: it is kept for the next call.

    Examples
    --------
    >>> observed_queries(1).tolist()
    [1.0]
    """
    weights = torch.zeros(count, dtype=torch.float64, device="cpu")
    for size in LAST:
        weights[max(count - size, 0) :] += 1 / min(size, count)
    every = slice(0, count, STRIDE if count >= LONG else KEPT)
    weights[every] += 1 / len(weights[every])
    return weights / weights.sum()


@torch.no_grad()
def tail_attention(
    queries: Tensor, keys: Tensor, mask: Tensor | None, tail: int, scaling: float, softcap: float | None = None
) -> Tensor:
    """Return the attention that the newest tokens receive from new queries, and from how many.

    Parameters
    ----------
    queries : Tensor
        ``(B, H_q, L, d)``, those of the last L keys.
    keys : Tensor
        ``(B, H, S, d)``.
    mask : Tensor or None
        ``(B or 1, H_q or 1, L, S)``, bool or additive; None means causal.
    tail : int
        Number of newest tokens.

    Returns
    -------
    Tensor
        ``(B, H, 3, tail)`` float32: sums over the queries of p and of p², each the mean of the group's heads, and the
        number of these queries.
    """
    (batch, heads, length, _), new = keys.shape, queries.shape[2]
    group = queries.shape[1] // heads
    place = torch.arange(length, device=keys.device)
    sums = torch.zeros(2, batch, heads, tail, dtype=torch.float32, device=keys.device)
    # One block if they are few: a step that depends on the length would be compiled again for every length.
    step = new if new <= FEW else max(MAX_WEIGHTS // (batch * queries.shape[1] * length), 1)
    # In float32, and the queries scaled first: in float16 products overflow that are none of the model's logits.
    transposed, grouped = keys.float().mT[:, :, None], scaling * queries.float().view(batch, heads, group, new, -1)
    for start in range(0, new, step):
        logits = (grouped[:, :, :, start : start + step] @ transposed).flatten(1, 2)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if mask is None:
            seen = place <= place[length - new + start :][: logits.shape[2], None]
            logits = logits.masked_fill(~seen, torch.finfo(torch.float32).min)
        else:
            part = mask[:, :, start : start + step]
            low = torch.finfo(torch.float32).min
            logits = logits.masked_fill(~part, low) if part.dtype == torch.bool else logits + part.float()
        weights = torch.softmax(logits, dim=-1)[..., length - tail :]
        weights = weights.view(batch, heads, group, -1, tail)
        sums += torch.stack([each.sum(3).mean(2) for each in (weights, weights.square())])
    numbers = (tail - torch.arange(tail, device=keys.device)).clamp(max=new).float()
    return torch.stack([*sums, numbers.expand_as(sums[0])], dim=2)


def spread_queries(now: Observation, before: Observation | None) -> Observation:
    """Return the queries of a prompt so far that `observed_queries` may still count, copied.

    Parameters
    ----------
    now : Observation
        The last forward pass.
    before : Observation or None
        What this function returned for the passes before it.
    """
    length, new = now.length, now.queries.shape[2]
    queries, device = now.queries, now.queries.device
    if new == length and now.valid is None:
        last = max(length - max(LAST), 0)
        kept = torch.cat([torch.arange(0, last, KEPT, device=device), torch.arange(last, length, device=device)])
        return now._replace(queries=queries.index_select(2, kept), places=kept.expand(len(queries), -1))
    places = torch.arange(length - new, length, device=device).expand(len(queries), -1)
    if before is not None:
        assert before.places is not None
        places = torch.cat([before.places.to(places.device), places], dim=1)
        queries = torch.cat([before.queries.to(queries.device), queries], dim=2)
    ranks, count = _ranks(places, now.valid, length)
    kept = (ranks >= 0) & ((ranks % KEPT == 0) | (ranks >= count - max(LAST)))
    most = min(kept.shape[1], -(-length // KEPT) + max(LAST))  # no number that depends on data, for torch.compile
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    # One by one: that copies whole queries, and not single numbers.
    picked = torch.stack([own.index_select(1, tokens) for own, tokens in zip(queries, order, strict=True)])
    return now._replace(queries=picked, places=torch.where(kept.gather(1, order), places.gather(1, order), -1))


def last_queries(over: Observation, needed: int) -> Tensor:
    """Return the last queries of a prompt ``(B, H_q, L, d)``, at most `needed`; those of padding are anything."""
    assert over.places is not None
    wanted = torch.arange(max(over.length - needed, 0), over.length, device=over.places.device)
    index = (over.places[:, None] == wanted[:, None]).to(torch.uint8).argmax(-1)[:, None, :, None]
    return over.queries.gather(2, index.expand(-1, over.queries.shape[1], -1, over.queries.shape[-1]))


class ObservedQueries(NamedTuple):
    """The observed queries of one sequence.

    Attributes
    ----------
    queries : Tensor
        ``(H_q, L, d)``. The others are where the places were, best on the CPU: sizes depend on them.
    weights : Tensor
        ``(L,)``: how much the attention of each counts; their sum is 1.
    spread : Tensor
        ``(L,)`` bool: whether it is one of those spread evenly over the prompt; if none is, all count as such.
    whole : Tensor
        ``(L,)`` bool: whether all heads ask it; see `attention_moments`.
    """

    queries: Tensor
    weights: Tensor
    spread: Tensor
    whole: Tensor


def queries_of_row(over: Observation, row: int) -> ObservedQueries:
    """Return the observed queries of one sequence.

    Padding counts for nothing: a padded row has the queries and weights that it would have alone.
    """
    assert over.places is not None
    valid = None if over.valid is None else over.valid[row : row + 1]
    ranks, count = _ranks(over.places[row : row + 1], valid, over.length)
    weights = observed_queries(max(int(count), 1)).to(ranks.device)
    counted, spread = torch.where(ranks[0] >= 0, weights[ranks[0].clamp(min=0)], 0), ranks[0] % KEPT == 0
    chosen = torch.nonzero((counted > 0) | spread)[:, 0]
    share = counted[chosen]
    queries = over.queries[row]
    if len(chosen) < queries.shape[1]:
        queries = queries.index_select(1, to_device(chosen, queries.device))
    spread = spread[chosen]
    # Of a last turn of a few tokens, perhaps none is of that set.
    whole = (ranks[0, chosen] >= count[0] - LAST[0]) | (count[0] < LONG)
    return ObservedQueries(queries, share / share.sum(), spread | ~spread.any(), whole)


def _ranks(places: Tensor, valid: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """Return each place's number among the tokens that are not padding, and the number of those, ``(B, 1)``."""
    if valid is None:
        return places, torch.full((len(places), 1), length, dtype=torch.int64, device=places.device)
    valid = valid.to(places.device)
    at = places.clamp(min=0)
    real = valid.gather(1, at) & (places >= 0)
    return torch.where(real, (valid.cumsum(1) - 1).gather(1, at), -1), valid.sum(1, keepdim=True)


def attention_moments(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    scaling: float,
    softcap: float | None = None,
    whole: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted means of p and of p² over queries and the heads of a group, ``(H, S)`` float32 each.

    Every query sees every key, also those after it: what a token would receive if it were asked.

    Parameters
    ----------
    queries : Tensor
        ``(H_q, L, d)``.
    weights : Tensor
        ``(L,)``: how much each query counts; on the CPU, as `whole`.
    keys : Tensor
        ``(H, S, d)``.
    scaling, softcap : float
        The model's.
    whole : Tensor, optional
        ``(L,)`` bool: where it is False, one head of each group stands for all of them, in turn. None: all heads count.
    """
    heads, _, width = keys.shape
    grouped = queries.reshape(heads, -1, width)
    group = grouped.shape[1] // queries.shape[1]
    share = (weights / group).float().repeat(group)
    if whole is not None:
        sampled = ~whole & (weights > 0)
        turn = sampled & (sampled.cumsum(0) % group == torch.arange(group, device=whole.device)[:, None])
        asking = torch.nonzero((whole | turn).flatten())[:, 0]
        share = torch.where(whole.repeat(group), share, share * group)[asking]
        if keys.device.type == "cpu":
            # Head by head: that copies whole queries, and not single numbers.
            grouped = torch.stack([each.index_select(0, asking) for each in grouped])
        else:
            grouped = grouped.index_select(1, to_device(asking, keys.device))
    # On the CPU, logits, probabilities and their squares take less than the keys do.
    most = min(keys.numel() // KEYS_PER_WEIGHT, MAX_WEIGHTS) if keys.device.type == "cpu" else MAX_WEIGHTS_ELSEWHERE
    return attention_received(grouped, to_device(share, keys.device), keys, scaling, softcap, most)
