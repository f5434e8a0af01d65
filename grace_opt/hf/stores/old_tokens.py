"""`OldTokens`: the tokens of a prompt that a store is made of, evicted ones gone and sink tokens first.

The order is the paper's (and ThinK's): tokens first, then what is done with those that are left. The recent window and
the sink tokens stay, whatever is evicted. In a padded row, the sink tokens are the first real ones: the row gives the
same result as it would alone.

Source: GRACE (arXiv 2604.16983), Algorithm 1; ThinK (arXiv 2407.21018).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..bases.importance import last_queries
from ..evict.kept_tokens import kept_tokens
from ..evict.kept_tokens import tokens_kept as tokens_of_budget
from ..evict.layer_budgets import LayerBudgets
from ..models.observation import Observation
from .packed.masked import take
from .plan import LayerPlan


@dataclass(frozen=True)
class OldTokens:
    """The tokens of a prompt before its recent window.

    Attributes
    ----------
    length : int
        Number of tokens before the recent window; with eviction, more than are left.
    keys, values : Tensor
        ``(B, H, n, d)`` and ``(B, H, n, d_v)`` of those that are left, in the order in which they are stored. Values
        in their own order are a view of the prompt's: copying them now would need memory for another layer's V.
    evicted : Tensor or None
        ``(B, H, n)``, ascending: the positions of those that are left; None if all are.
    order : Tensor or None
        ``(B, 1 or H, n)``: the positions in the order in which they are stored; None for all, in ascending order.
    """

    length: int
    keys: Tensor
    values: Tensor
    evicted: Tensor | None
    order: Tensor | None

    @staticmethod
    def of(plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor, recent: int, count: int) -> OldTokens:
        """Return the tokens of a prompt but its `recent` last ones, so many left that, with these, there are `count`.

        `keys` and `values` are those of the prompt, ``(B, H, S, d)`` and ``(B, H, S, d_v)``.
        """
        old, sinks = over.length - recent, plan.config.sink_tokens
        evicted = evicted_positions(plan, over, keys, values, recent, count)
        order = _sinks_first(over.valid, evicted, keys, old, sinks)
        stored_keys, stored_values = keys[:, :, :old], values[:, :, :old]
        if order is not None:
            stored_keys, stored_values = take(stored_keys, order), take(stored_values, order)
        return OldTokens(old, stored_keys, stored_values, evicted, order)

    @property
    def positions(self) -> Tensor | None:
        """`order` as a store has it, in int32."""
        return None if self.order is None else self.order.to(torch.int32)

    def seen(self, over: Observation, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the keys of a prompt ``(B, H, S, d)`` without evicted ones, and which are no padding.

        In ascending order, not with the sinks first: the last columns must be those of the queries.
        """
        if self.evicted is None:
            return keys, over.valid
        left = self.keys if self.order is self.evicted else take(keys[:, :, : self.length], self.evicted)
        valid = over.valid
        if valid is not None:  # padded entries are the same in every head: see kept_tokens
            valid = torch.cat([valid[:, : self.length].gather(-1, self.evicted[:, 0]), valid[:, self.length :]], dim=-1)
        return torch.cat([left, keys[:, :, self.length :]], dim=2), valid

    def seen_values(self, values: Tensor) -> Tensor:
        """Return the values of a prompt ``(B, H, S, d_v)`` of the tokens of `seen`."""
        if self.evicted is None:
            return values
        return torch.cat([take(values[:, :, : self.length], self.evicted), values[:, :, self.length :]], dim=2)

    def real(self, over: Observation) -> Tensor | None:
        """Return which of the stored tokens are no padding, ``(B, 1 or H, n)``; None if all are."""
        if over.valid is None:
            return None
        real = over.valid[:, None, : self.length]
        return real if self.order is None else real.expand(-1, self.order.shape[1], -1).gather(-1, self.order)


def without_full_mask(over: Observation) -> Observation:
    """Drop a mask that hides nothing: a later chunk has one anyway; a GPU would have to be waited for."""
    if over.valid is not None and over.valid.device.type == "cpu" and bool(over.valid.all()):
        return over._replace(valid=None)
    return over


def tokens_kept(plan: LayerPlan, layer: int, length: int, group: int = 1) -> int:
    """Return how many tokens of a prompt each KV head of a layer keeps, the recent window among them."""
    config = plan.config
    least = config.recent_window + config.sink_tokens + group
    # Losses are those of the model's layers; a budget that falls from layer to layer is a mean over those that evict.
    place = layer if isinstance(config.evict, LayerBudgets) else plan.layers.index(layer)
    return min(tokens_of_budget(config.evict, place, len(plan.layers), length, least, config.dense_layers), length)


def evicted_positions(
    plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor, recent: int, count: int
) -> Tensor | None:
    """Return the positions before the recent tokens that each KV head keeps, ``(B, H, n)`` ascending; None for all."""
    evict, queries = plan.config.evict, over.queries
    if evict is None or over.length <= count:
        return None
    if over.places is not None and evict.queries_needed is not None:
        queries = last_queries(over, evict.queries_needed)
    kept = kept_tokens(
        evict,
        queries,
        keys,
        over.valid,
        over.scaling,
        plan.index,
        len(plan.layers),
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
