"""`ChannelParts`: the tensors of a store without some channels of its keys, for what computes attention over them."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from torch import Tensor

from ..packed.tokens import StoredTensor
from ..store import Store
from .index import ReadIndex


@dataclass(frozen=True)
class ChannelParts(Store, ABC):
    """Keys with the kept channels alone, values, and what says which they are.

    Attributes
    ----------
    length : int
        Number of tokens of the sequence that this covers; with eviction, more than are stored.
    sink_keys : Tensor
        ``(B, H, s, d)``: the keys of the first tokens, dense; s = 0 keeps none.
    pruned_keys : Tensor or QuantizedTokens
        ``(B, H, S_p, d')``: only the kept channels.
    kept_indices : Tensor
        ``(B, H, d')`` int64, sorted: which channels these are.
    values : Tensor or QuantizedTokens
        ``(B, H, s + S_p, d_v)``.
    positions : Tensor or None
        ``(B, 1 or H, s + S_p)`` int32: positions of the stored tokens in the sequence; None means all tokens, in order.
    index : ReadIndex or None
        With ``read=``: how a step finds the tokens that it reads. With ``by="channels"``, all channels are stored, and
        `kept_indices` has those that give scores first.
    """

    length: int
    sink_keys: Tensor
    pruned_keys: StoredTensor
    kept_indices: Tensor
    values: StoredTensor
    positions: Tensor | None = None
    index: ReadIndex | None = None

    @property
    def stored(self) -> int:
        """Number of tokens stored per KV head."""
        return self.sink_keys.shape[-2] + self.pruned_keys.shape[-2]
