"""Compress a prompt's keys and values for storage: evict tokens, choose channels, cut, quantise.

The order is the paper's (and ThinK's): tokens first, then the channels of the tokens that are left. The recent window
and the sink tokens stay dense, whatever is evicted. In a padded row, the sink tokens are the first real ones: the row
gives the same result as it would alone.

Source: GRACE (arXiv 2604.16983), Algorithm 1; ThinK (arXiv 2407.21018); KIVI (arXiv 2402.02750) for the dimensions
along which keys and values are quantised.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...kernels.cache.gather import gather_channels
from ..bases.importance import last_queries
from ..evict.kept_tokens import kept_tokens, tokens_kept, tokens_of_heads
from ..models.observation import Observation
from ..settings.reading import CHANNELS
from ..stores.channels.by_heads import ByHeads
from ..stores.channels.index import ReadIndex, all_channels, padding_of
from ..stores.channels.storage import Compressed, StoredTensor, dequantized
from ..stores.coded.code_prompt import code_prompt
from ..stores.coded.coded import CodedTokens
from ..stores.packed.tokens import quantize
from ..stores.plan import LayerPlan
from .channel_choice import choose_channels
from .masking import kept_channels


@torch.no_grad()
def compress(
    plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor
) -> Compressed | ByHeads | CodedTokens | None:
    """Compress all of a prompt but its recent window.

    Parameters
    ----------
    plan : LayerPlan
        How.
    over : Observation
        The prompt's last queries, and its padding.
    keys, values : Tensor
        ``(B, H, S, d)`` and ``(B, H, S, d_v)``, of exactly the prompt.

    Returns
    -------
    Compressed, ByHeads, CodedTokens or None
        None if the prompt is too short to prune. Values that are neither evicted nor quantised are a view of
        ``values``: copying them now would need memory for another layer's V.
    """
    if over.valid is not None and over.valid.device.type == "cpu" and bool(over.valid.all()):
        over = over._replace(valid=None)  # a later chunk has a mask anyway; a GPU would have to be waited for
    config, sinks, length = plan.config, plan.config.sink_tokens, over.length
    recent, group, count = config.recent_window, config.key_group, length
    if config.evict is not None:
        least = recent + sinks + group
        count = _tokens_kept(plan, plan.index, length, group)
        if plan.heads_may_differ:
            spare = (length - recent - sinks) % group  # dense in all heads, also in one that keeps all tokens
            counts = tokens_of_heads(
                config.evict, plan.index, keys.shape[1], length, least + spare, config.dense_layers, group
            )
            if len({*counts}) > 1:
                return _by_heads(plan, over, keys, values, recent + spare, counts)
            count = counts[0] if counts else count
    if plan.bits is not None:
        places = tuple(_tokens_kept(plan, layer, length) - recent for layer in plan.bits.layers)
        return code_prompt(plan, over, keys, values, _evicted(plan, over, keys, values, recent, count), places)
    # Tokens that do not fill a group stay dense, with the recent window.
    recent += max(count - recent - sinks, 0) % group
    if length <= recent + sinks:
        return None
    return _compressed(plan, over, keys, values, recent, count)


def _tokens_kept(plan: LayerPlan, layer: int, length: int, group: int = 1) -> int:
    """Return how many tokens of a prompt each KV head of a layer keeps, the recent window among them."""
    config = plan.config
    if config.evict is None:
        return length
    least = config.recent_window + config.sink_tokens + group
    return min(tokens_kept(config.evict, layer, plan.layers, length, least, config.dense_layers), length)


def _by_heads(
    plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor, recent: int, counts: tuple[int, ...]
) -> ByHeads:
    """Compress each run of heads that keep equally many tokens; `recent` tokens stay dense in all of them."""
    group, start, found = over.queries.shape[1] // keys.shape[1], 0, []
    for count, same in itertools.groupby(counts):
        stop = start + len(list(same))
        own = over._replace(queries=over.queries[:, group * start : group * stop])
        found.append(_compressed(plan, own, keys[:, start:stop], values[:, start:stop], recent, count))
        start = stop
    return ByHeads(tuple(found))


def _compressed(
    plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor, recent: int, count: int
) -> Compressed:
    """Keep `count` tokens, the `recent` ones among them, which stay dense."""
    config, sinks, old = plan.config, plan.config.sink_tokens, over.length - recent
    evicted = _evicted(plan, over, keys, values, recent, count)
    order = _sinks_first(over.valid, evicted, keys, old, sinks)
    stored_keys, stored_values = keys[:, :, :old], values[:, :, :old]
    seen, valid = keys, over.valid
    if evicted is not None:
        stored_keys = _take(stored_keys, evicted)
        # In ascending order, not with the sinks first: the last columns of `valid` must be those of the queries.
        seen = torch.cat([stored_keys, keys[:, :, old:]], dim=2)
        if valid is not None:  # padded entries are the same in every head: see kept_tokens
            valid = torch.cat([valid[:, :old].gather(-1, evicted[:, 0]), valid[:, old:]], dim=-1)
    if order is not None:
        stored_keys = stored_keys if order is evicted else _take(keys[:, :, :old], order)
        stored_values = _take(stored_values, order)
    observed = over.queries[:, :, -min(config.channels.observation_window, seen.shape[2]) :]
    kept = kept_channels(choose_channels(plan, observed, seen, valid), seen)
    lead = kept.shape[-1]
    if config.read is not None and config.read.by == CHANNELS:
        kept = all_channels(kept, keys.shape[-1])
    channels = gather_channels(stored_keys[:, :, sinks:], kept)
    pruned: StoredTensor
    kept_values: StoredTensor
    pruned, kept_values = channels, stored_values
    if config.quantize is not None:
        if over.valid is not None:
            real = over.valid[:, None, :old]
            real = real if order is None else real.expand(-1, order.shape[1], -1).gather(-1, order)
            channels, kept_values = with_real_alone(channels, real[..., sinks:]), with_real_alone(stored_values, real)
        pruned, kept_values = quantize(config.quantize, channels, kept_values)
    index = None
    if config.read is not None:
        padding = padding_of(over.valid, order, old, sinks)
        index = ReadIndex.of(config.read, dequantized(pruned), lead, padding, plan.index)
    return Compressed(
        length=old,
        sink_keys=stored_keys[:, :, :sinks].clone(),
        pruned_keys=pruned,
        kept_indices=kept,
        values=kept_values,
        positions=None if order is None else order.to(torch.int32),
        index=index,
    )


def _evicted(
    plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor, recent: int, count: int
) -> Tensor | None:
    """Return the positions before the recent tokens that each KV head keeps, ``(B, H, n)`` ascending; None for all."""
    if plan.config.evict is None:
        return None
    evict, queries = plan.config.evict, over.queries
    if over.places is not None and evict.queries_needed is not None:
        queries = last_queries(over, evict.queries_needed)
    kept = kept_tokens(
        evict,
        queries,
        keys,
        over.valid,
        over.scaling,
        plan.index,
        plan.layers,
        over.softcap,
        values=values,
        first=plan.config.sink_tokens,
        last=recent,
        count=count,
    )
    return None if kept is None else kept[..., : kept.shape[-1] - recent]


def _sinks_first(valid: Tensor | None, kept: Tensor | None, keys: Tensor, old: int, sinks: int) -> Tensor | None:
    """Return the positions in the order in which old tokens are stored, ``(B, 1 or H, n)``; None for ascending order.

    The sink tokens come first. In a padded row, they are the first tokens that are not padding.
    """
    if kept is None and (valid is None or sinks == 0):
        return None
    order = torch.arange(old, device=keys.device).expand(keys.shape[0], 1, -1) if kept is None else kept
    if valid is not None and sinks:
        count = order.shape[-1]
        padding = (~valid[:, :old].gather(-1, order[:, 0])).sum(-1, keepdim=True).clamp(max=count - sinks)
        place = torch.arange(count, device=keys.device)
        others = (place < padding) | (place >= padding + sinks)
        by_sink = others.to(torch.uint8).argsort(dim=-1, stable=True)
        order = order.gather(-1, by_sink[:, None].expand(-1, order.shape[1], -1))
    return order


def with_real_alone(tensor: Tensor, real: Tensor) -> Tensor:
    """Return keys or values in which a masked token has the numbers of the next real one, to be quantised.

    A group's scale would otherwise follow from what padding holds, and a row would differ from the same row alone.

    Parameters
    ----------
    tensor : Tensor
        ``(B, H, n, C)``.
    real : Tensor
        ``(B, 1 or H, n)`` bool, False at masked tokens. Behind the last real one they have its numbers; zeros if none
        is real.
    """
    count = tensor.shape[2]
    place = torch.arange(count, device=real.device)
    ahead = torch.where(real, place, count).flip(-1).cummin(-1).values.flip(-1)
    behind = torch.where(real, place, 0).cummax(-1).values
    found = _take(tensor, torch.where(ahead < count, ahead, behind))
    return found.masked_fill(~real.any(-1)[..., None, None], 0)


def _take(tensor: Tensor, order: Tensor) -> Tensor:
    """Gather tokens of ``(B, H, S, C)`` in the order ``(B, 1 or H, n)``."""
    index = order.expand(-1, tensor.shape[1], -1)[..., None].expand(-1, -1, -1, tensor.shape[-1])
    return tensor.gather(2, index)
