"""`LayerPlan`: how one layer is pruned, by which channels are chosen and which tokens stay dense.

A plan is frozen and belongs to one layer, so the layers of a cache may be pruned differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...attention.masks import ChannelMask
from ...attention.provider import MaskProvider
from ..bases.budget import BitBudget
from ..settings.config import CacheConfig


class MaskSource(Protocol):
    """Decides which channels are pruned: a `grace_opt.MaskProvider`, a static mask, or a function of yours.

    It receives queries ``(B, H_q, L_obs, d)``, keys ``(B, H, S, d)`` and, if there is padding, a bool tensor ``(B,
    S)``, False at padding. It covers the keys; its last ``L_obs`` columns cover the queries.
    """

    def __call__(self, queries: Tensor, keys: Tensor, attention_mask: Tensor | None = None) -> ChannelMask: ...


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is pruned; the layers of a cache may have different plans.

    Attributes
    ----------
    index : int
        Position of the layer in the model.
    layers : tuple of int
        Positions of all layers that are compressed.
    source : MaskSource
        Chooses the channels when the prompt is over.
    config : CacheConfig
        Windows, sinks, growth, eviction and quantisation.
    chunk_size : int, optional
        A forward pass of exactly this many tokens may be a part of a longer prompt.
    announces : bool
        Whether this layer warns the user that a prompt was too short to prune; one layer per cache does.
    bits : BitBudget, optional
        Codes keys and values instead of pruning channels.
    """

    index: int
    layers: tuple[int, ...]
    source: MaskSource
    config: CacheConfig
    chunk_size: int | None = None
    announces: bool = False
    bits: BitBudget | None = None

    @property
    def heads_may_differ(self) -> bool:
        """Whether heads may keep different numbers of tokens: where they are coded or read in part, they are alike."""
        return self.bits is None and self.config.read is None and isinstance(self.source, MaskProvider)

    @property
    def observed(self) -> int | None:
        """Number of last prompt queries that are needed; None means all."""
        needed = 0 if self.config.evict is None else self.config.evict.queries_needed
        return None if needed is None else max(needed, self.config.channels.observation_window)
