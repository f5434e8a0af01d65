"""How a layer is to be pruned: who chooses the channels, and which tokens stay dense.

A plan is frozen and belongs to one layer, so layers of one cache may be pruned differently. Source: the windows are
ThinK's (arXiv 2407.21018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..masks import ChannelMask


class MaskSource(Protocol):
    """What decides which channels go: a `grace_opt.provider.MaskProvider`, a static mask, a function of yours.

    It is given queries ``(B, H_q, L_obs, d)``, keys ``(B, H, S, d)`` and, if anything is padded, ``(B, S)`` bool, False
    at padding: of the keys, and, at the last ``L_obs`` places, of the queries.
    """

    def __call__(self, queries: Tensor, keys: Tensor, attention_mask: Tensor | None = None) -> ChannelMask: ...


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is to be pruned; layers of one cache may differ in it.

    Attributes
    ----------
    index : int
        Position of the layer in the model, for messages.
    source : MaskSource
        Decides the channels when the prompt is over.
    recent_window : int
        So many of the prompt's last tokens stay dense.
    observation_window : int
        So many of the prompt's last queries are shown to ``source``; clipped to the prompt.
    fused : bool
        Whether decoding works on the pruned keys themselves rather than on zero-filled ones.
    announces : bool
        Whether this layer tells the user that a prompt was too short to be pruned; one layer per cache does.
    """

    index: int
    source: MaskSource
    recent_window: int = 32
    observation_window: int = 32
    fused: bool = True
    announces: bool = False
