"""`CHANNELS`: makes stores without some channels of their keys: of a prompt, or of a file.

Source: GRACE (arXiv 2604.16983), Algorithm 1; ThinK (arXiv 2407.21018); KIVI (arXiv 2402.02750) for the dimensions
along which keys and values are quantised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....kernels.cache.gather import gather_channels
from ...evict.kept_tokens import tokens_of_heads
from ...models.observation import Observation
from ...settings.reading import CHANNELS as BY_CHANNELS
from ..maker import StoreMaker, all_dense, dense_windows
from ..old_tokens import OldTokens, tokens_kept
from ..packed.masked import with_real_alone
from ..packed.tokens import StoredTensor, dequantized, quantize
from ..plan import LayerPlan
from ..saved import LayerCheck
from ..store import Store
from ..tail import Tail
from ..tally import LayerReading
from .by_heads import ByHeads
from .choice import check_numbers, choose_channels, needs_values
from .idle import idle_channels
from .index import ReadIndex, all_channels, padding_of
from .kept import kept_channels
from .saved import channels_of_file
from .storage import Compressed


class ChannelMaker(StoreMaker):
    """Makes `Compressed`, and `ByHeads` where heads keep different numbers of tokens."""

    def of_prompt(self, plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor) -> Store | None:
        """Return a store of all of a prompt but its recent window; None if it is too short to prune."""
        config, sinks, length = plan.config, plan.config.sink_tokens, over.length
        recent, group = config.recent_window, config.key_group
        count = tokens_kept(plan, plan.index, length, group)
        if plan.heads_may_differ:
            spare = (length - recent - sinks) % group  # dense in all heads, also in one that keeps all tokens
            least = recent + sinks + group + spare
            counts = tokens_of_heads(config.evict, plan.index, keys.shape[1], length, least, config.dense_layers, group)
            if len({*counts}) > 1:
                return _by_heads(plan, over, keys, values, recent + spare, counts)
            count = counts[0] if counts else count
        # Tokens that do not fill a group stay dense, with the recent window.
        recent += max(count - recent - sinks, 0) % group
        if length <= recent + sinks:
            return None
        return _compressed(plan, over, keys, values, recent, count)

    def of_file(
        self, check: LayerCheck, plan: LayerPlan, about: dict[str, Any], tensors: dict[str, Tensor], tail: Tail
    ) -> Callable[[torch.device], Store]:
        """See `grace_opt.hf.stores.channels.saved`."""
        return channels_of_file(check, plan, about, tensors, tail)

    def check_numbers(self, plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor) -> Tensor | None:
        """Raise if channels are chosen from numbers that are not finite."""
        return check_numbers(plan, over, keys, values)

    def why_dense(self, plan: LayerPlan, length: int) -> str:
        """Say why a prompt stays dense, and what to write instead."""
        config, groups, causes = plan.config, "", {}
        if plan.config.key_group > 1:
            groups = f", as do tokens that fill no group_size={plan.config.key_group}"
            causes = {"group_size": length > config.recent_window + config.sink_tokens}
        missed = "nothing is pruned; to prune" if config.read is None else "every token is read; to read few of"
        return dense_windows(plan, length, missed, groups, causes)

    def instead_of_terms(self, plan: LayerPlan) -> str | None:
        """Say what to write if a model adds terms to its logits: what reads few keys, or pruned ones, has none."""
        if plan.config.read is not None:
            return "leave out read="
        return "write fused=False among the settings of CompressedCache() or attach()" if plan.config.fused else None

    def stored_as(self, plan: LayerPlan) -> str:
        """Return what becomes of old tokens: those that are read by channels, and in few channels, are all stored."""
        config = plan.config
        if not config.channels.drops_none and (config.read is None or config.read.by != BY_CHANNELS):
            return "pruned"
        return "whole" if config.quantize is None else "quantised"

    def idle(self, plan: LayerPlan, stores: Sequence[Store], readings: Sequence[LayerReading]) -> tuple[str, ...]:
        """Say which settings have changed nothing."""
        return idle_channels(plan.config, stores, readings) if stores else (all_dense(plan),)


CHANNELS = ChannelMaker()


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
    config, sinks = plan.config, plan.config.sink_tokens
    old = OldTokens.of(plan, over, keys, values, recent, count)
    seen, valid = old.seen(over, keys)
    observed = over.queries[:, :, -min(config.channels.observation_window, seen.shape[2]) :]
    seen_values = old.seen_values(values) if needs_values(plan.source) else None
    kept = kept_channels(choose_channels(plan, observed, seen, valid, seen_values, over.scaling), seen)
    lead = kept.shape[-1]
    if config.read is not None and config.read.by == BY_CHANNELS:
        kept = all_channels(kept, keys.shape[-1])
    channels = gather_channels(old.keys[:, :, sinks:], kept)
    pruned: StoredTensor
    kept_values: StoredTensor
    pruned, kept_values = channels, old.values
    if config.quantize is not None:
        real = old.real(over)
        if real is not None:
            channels, kept_values = with_real_alone(channels, real[..., sinks:]), with_real_alone(old.values, real)
        pruned, kept_values = quantize(config.quantize, channels, kept_values)
    index = None
    if config.read is not None:
        padding = padding_of(over.valid, old.order, old.length, sinks)
        index = ReadIndex.of(config.read, dequantized(pruned), lead, padding, plan.index)
    return Compressed(
        length=old.length,
        sink_keys=old.keys[:, :, :sinks].clone(),
        pruned_keys=pruned,
        kept_indices=kept,
        values=kept_values,
        positions=old.positions,
        index=index,
    )
