"""How much each token matters: the attention that it receives from queries of the prompt.

Three sets of queries are averaged: the last 32, the last 128, and every eighth of all. An error in a token's key
changes its logit, and counts by the attention p that it receives; an error in its value changes the output directly,
and counts by p².

Source: SnapKV (arXiv 2404.14469) for the last queries, H2O (arXiv 2306.14048) for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Numbers of last queries that are averaged, as sets of their own.
LAST = (32, 128)
#: Distance between queries of the third set.
STRIDE = 8
#: Largest number of attention weights at once.
MAX_WEIGHTS = 2**22


def observed_positions(length: int, last: Sequence[int] = LAST, stride: int = STRIDE) -> tuple[Tensor, Tensor]:
    """Return which queries of a prompt are observed, ascending, and the weight of each; the weights sum to 1."""
    weights = torch.zeros(length, dtype=torch.float64)
    for count in last:
        weights[max(length - count, 0) :] += 1 / min(count, length)
    every = torch.arange(stride - 1, length, stride)
    if len(every):
        weights[every] += 1 / len(every)
    weights /= weights.sum()
    positions = torch.nonzero(weights)[:, 0]
    return positions, weights[positions]


def attention_moments(
    queries: Tensor,
    positions: Tensor,
    weights: Tensor,
    keys: Tensor,
    scaling: float,
    softcap: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the weighted means of p and of p² over queries and the heads of a group, ``(H, S)`` float32 each.

    Parameters
    ----------
    queries : Tensor
        ``(H_q, L, d)``.
    positions, weights : Tensor
        ``(L,)``: where the queries stand among the keys, and how much each counts.
    keys : Tensor
        ``(H, S, d)``.
    scaling, softcap : float
        The model's.
    causal : bool
        Whether a query sees only keys up to its own position.
    """
    heads, length, width = keys.shape
    grouped = queries.float().reshape(heads, -1, queries.shape[1], width)
    first, second = (torch.zeros(heads, length, device=keys.device) for _ in range(2))
    share = (weights / grouped.shape[1]).to(keys.device, torch.float32)
    place = torch.arange(length, device=keys.device)
    step = max(MAX_WEIGHTS // (length * grouped.shape[1]), 1)
    for head in range(heads):
        transposed = keys[head].float().mT * scaling
        for start in range(0, queries.shape[1], step):
            part = slice(start, start + step)
            logits = grouped[head, :, part] @ transposed
            if softcap is not None:
                logits = torch.tanh(logits / softcap).mul_(softcap)
            if causal:
                hidden = place > positions[part, None].to(place.device)
                logits = logits.masked_fill_(hidden, torch.finfo(torch.float32).min)
            found = torch.softmax(logits, dim=-1)
            by_query = share[part, None]
            first[head] += (found * by_query).sum((0, 1))
            second[head] += (found.square_() * by_query).sum((0, 1))
    return first, second
