"""`Stored`: the keys and values that a new token attends to, as every implementation gets them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Stored(NamedTuple):
    """All stored tokens of a layer: sinks, old tokens, of which few are read, and a dense tail.

    Attributes
    ----------
    keys : Tensor
        ``(B, H, S_p, d')``: of the old tokens.
    kept_indices : Tensor
        ``(B, H, d')`` int64: which channels these are.
    sink_keys, tail_keys : Tensor
        ``(B, H, S_s, d)`` and ``(B, H, S_t, d)``.
    old_values, tail_values : Tensor
        ``(B, H, S_s + S_p, d_v)``, of sinks and old tokens, and ``(B, H, S_t, d_v)``.
    """

    keys: Tensor
    kept_indices: Tensor
    sink_keys: Tensor
    tail_keys: Tensor
    old_values: Tensor
    tail_values: Tensor

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Numbers of sinks, old tokens and tokens of the tail."""
        return self.sink_keys.shape[2], self.keys.shape[2], self.tail_keys.shape[2]
