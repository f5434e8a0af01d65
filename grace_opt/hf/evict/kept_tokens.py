"""Which of a prompt's tokens a KV head keeps: as many as an eviction's budget says, by its scores.

When: the prompt is over, before channels are pruned. Sinks and the recent window stay whatever their scores are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import OptionError
from ..models.placement import own_heads
from .eviction import TokenEviction
from .layer_budgets import LayerBudgets
from .received import check_valid


def tokens_kept(
    eviction: TokenEviction | None, layer: int, layers: int, length: int, least: int, dense_layers: int = 0
) -> int:
    """Return how many tokens each KV head keeps: all without an eviction; of a share, at least `least` or all."""
    if eviction is None:
        return length
    if isinstance(eviction, LayerBudgets):
        return eviction.tokens(layer, layers, length, least=least, dense_layers=dense_layers)
    count = eviction.tokens(layer, layers, length)
    is_share = isinstance(getattr(eviction, "budget", None), float)
    return max(count, min(least, length)) if is_share else count


def tokens_of_heads(
    eviction: TokenEviction | None, layer: int, heads: int, length: int, least: int, dense_layers: int, step: int
) -> tuple[int, ...]:
    """Return how many tokens each of this process's KV heads keeps; nothing if its budget is not divided among heads.

    Parameters
    ----------
    heads : int
        Number of KV heads here: all, or this rank's.
    step : int
        Numbers differ from `length` by a multiple of this.
    """
    if not isinstance(eviction, LayerBudgets):
        return ()
    counts = eviction.tokens_of_heads(layer, length, least=least, dense_layers=dense_layers, step=step)
    return counts[own_heads(len(counts), heads)]


def kept_tokens(
    eviction: TokenEviction,
    queries: Tensor,
    keys: Tensor,
    valid: Tensor | None,
    scaling: float,
    layer: int,
    layers: int,
    softcap: float | None = None,
    *,
    values: Tensor | None = None,
    first: int = 0,
    last: int = 0,
    count: int | None = None,
) -> Tensor | None:
    """Return the positions that each KV head keeps, ascending; None if it keeps all.

    Parameters
    ----------
    eviction : TokenEviction
        Scores the tokens and knows how many stay.
    queries, keys, valid, scaling, softcap
        As in `TokenEviction.scores`.
    layer, layers : int
        Position of the layer in the model, and the model's number of layers.
    values : Tensor (B, H, S, d_v), optional
        All values of the prompt, for evictions that read them.
    first, last : int
        Number of first real tokens, and of last tokens, that stay whatever their scores are.
    count : int, optional
        Number of tokens that stay, from `tokens_kept`; by default the budget, and one more than the first and last
        ones at least if it is a share.

    Returns
    -------
    Tensor (B, H, tokens), int64, or None
        Among equal scores the lowest position stays. Padding is dropped before any real token. A row with too few real
        tokens keeps its last padding tokens, the same in every head.
    """
    length = keys.shape[2]
    if count is None:
        count = tokens_kept(eviction, layer, layers, length, first + last + 1)
    if length <= count:
        return None
    if count <= first + last:
        raise OptionError(
            f"layer {layer} keeps {count} tokens, of which {first + last} stay dense (sink tokens, recent window, "
            f"tokens that fill no group): nothing would be left to prune. Give a larger budget."
        )
    check_valid(keys, valid)
    if isinstance(eviction, LayerBudgets):
        eviction = eviction.keeping(count)
    read = {"values": values} if _reads_values(getattr(eviction.scores, "__func__", eviction.scores)) else {}
    scores = eviction.scores(queries, keys, valid, scaling, softcap, **read)
    scores = scores.clamp(min=torch.finfo(torch.float32).min)
    number = torch.arange(1, length + 1, device=keys.device)[None] if valid is None else valid.cumsum(-1)
    place = torch.arange(length, device=keys.device)
    scores = scores.masked_fill(((number <= first) | (place >= length - last))[:, None], torch.inf)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None], -torch.inf)
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
    if valid is not None:
        missing = count - valid.sum(-1, keepdim=True)
        from_the_end = (~valid).flip(-1).cumsum(-1).flip(-1)
        keep = (keep & valid[:, None]) | (~valid & (from_the_end <= missing))[:, None]
    return keep.nonzero()[:, 2].view(*keep.shape[:2], count)


@functools.cache
def _reads_values(scores: Callable[..., Tensor]) -> bool:
    """Return whether an eviction's method has a parameter for the values: those from before there was one have none."""
    return "values" in inspect.signature(scores).parameters
