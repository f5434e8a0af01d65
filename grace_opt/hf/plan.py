"""How a layer is to be pruned: who chooses the channels, which tokens stay dense, and when the prompt is over.

A plan is frozen and belongs to one layer, so layers of one cache may be pruned differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..attention.masks import ChannelMask
from .config import PruningConfig


class MaskSource(Protocol):
    """What decides which channels go: a `grace_opt.MaskProvider`, a static mask, a function of yours.

    It is given queries ``(B, H_q, L_obs, d)``, keys ``(B, H, S, d)`` and, if anything is padded, ``(B, S)`` bool, False
    at padding: of the keys, and, at the last ``L_obs`` places, of the queries.
    """

    def __call__(self, queries: Tensor, keys: Tensor, attention_mask: Tensor | None = None) -> ChannelMask: ...


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is to be pruned; layers of one cache may differ in it.

    Attributes
    ----------
    index, layers : int
        Position of the layer in the model, and how many the model has.
    source : MaskSource
        Decides the channels when the prompt is over.
    config : PruningConfig
        Windows, sinks, growth, eviction and quantisation.
    chunk_size : int, optional
        A forward pass of exactly this many tokens may be a part of a longer prompt.
    announces : bool
        Whether this layer tells the user that a prompt was too short to be pruned; one layer per cache does.
    """

    index: int
    layers: int
    source: MaskSource
    config: PruningConfig
    chunk_size: int | None = None
    announces: bool = False

    @property
    def observed(self) -> int | None:
        """Number of the prompt's last queries that are needed; None means all of them."""
        needed = 0 if self.config.evict is None else self.config.evict.queries_needed
        return None if needed is None else max(needed, self.config.observation_window)
