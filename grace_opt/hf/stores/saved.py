"""What stores share when they are written to a file, and checked when they are read from one.

When: `grace_opt.hf.engine.saving` writes, and `grace_opt.hf.engine.saved_layer` reads. Every field and tensor must be
one that a layer can hold and must fit all others; otherwise a `CacheError` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import CacheError
from .packed.tokens import QuantizedTokens, StoredTensor


def group_prefix(number: int) -> str:
    """Return how the names of the tensors begin that a group of heads has for itself."""
    return f"heads.{number}."


def apart(parts: Mapping[str, StoredTensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return plain tensors, and what says how quantised ones are put together again, by name."""
    tensors: dict[str, Tensor] = {}
    quantized: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, QuantizedTokens):
            quantized[name] = part.meta()
            tensors |= {f"{name}.{key}": tensor for key, tensor in part.tensors().items()}
        else:
            tensors[name] = part
    return tensors, quantized


@dataclass(frozen=True)
class LayerCheck:
    """The checks of one layer; every message begins with the layer's number."""

    number: int

    def require(self, fits: bool, what: str) -> None:
        """Raise `CacheError` with the text unless it fits."""
        if not fits:
            raise CacheError(f"layer {self.number} of the saved cache: {what}; save the cache again")

    def placed(self, length: Any, stored: int, positions: Tensor | None, batch: int, heads: int) -> None:
        """Check the number of tokens that were seen, and which of them are stored."""
        self.require(stored > 0 and at_least(length, stored), f"length={length!r} for {stored} stored tokens")
        if positions is None:
            self.require(length == stored, f"length={length} for {stored} stored tokens, although none was evicted")
            return
        shapes = ((batch, 1, stored), (batch, heads, stored))
        fits = positions.dtype == torch.int32 and tuple(positions.shape) in shapes
        self.require(fits, f"positions are {positions.dtype} {tuple(positions.shape)}, not int32 of {stored} tokens")
        order = positions.sort(dim=-1).values
        within = int(order.min()) >= 0 and int(order.max()) < length and bool((order[..., 1:] > order[..., :-1]).all())
        self.require(within, f"positions are not distinct tokens from 0 to {length - 1}")

    def names(self, said: dict[str, Any], fields: set[str], found: dict[str, Tensor], tensors: tuple[str, ...]) -> None:
        """Check that there are exactly these fields and tensors."""
        for have, want, what in ((set(said), fields, "fields"), (set(found), set(tensors), "tensors")):
            lost = ", ".join(f"{self.number}.{name}" for name in sorted(want - have))
            self.require(not lost, f"it lacks {what}: {lost}")
            more = ", ".join(f"{self.number}.{name}" for name in sorted(have - want))
            self.require(not more, f"it has {what} that do not belong: {more}")

    def tokens_of(
        self, name: str, part: StoredTensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        """Check that keys or values are floating-point tensors (B, H, S, ...) with these first dimensions."""
        fits = len(part.shape) == 4 and tuple(part.shape[: len(shape)]) == tuple(shape)
        sizes = fits and min(part.shape[0], part.shape[1], part.shape[3]) > 0
        kind = part.dtype.is_floating_point if dtype is None else part.dtype == dtype
        self.require(sizes and kind, f"{name} are {part.dtype} {tuple(part.shape)} and do not fit the other tensors")


def at_least(value: Any, least: int) -> bool:
    """Whether a value of a file is an integer of at least so many."""
    return type(value) is int and value >= least
