"""Storage of one layer: the compressed prompt, and a dense tail that grows in chunks.

Both are plain containers; :mod:`grace_opt.hf.engine.layer` decides when to compress, and what. All tensors own exactly
their bytes. Slices are copied, because a view keeps the whole original alive and would make the memory report wrong.

Source: the two segments are ThinK's (arXiv 2407.21018), the residual block of quantised storage KIVI's (arXiv
2402.02750).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....errors import CacheError
from ....kernels.cache.gather import gather_channels
from ..packed.tokens import QuantizedTokens
from .index import ReadIndex

#: Number of tokens for which space is allocated at once.
TAIL_GROWTH = 64

#: A tensor (B, H, S, C), plain or quantised.
StoredTensor = Tensor | QuantizedTokens


class Tail:
    """Dense keys and values of the newest tokens, in buffers with spare room.

    Parameters
    ----------
    keys, values : Tensor
        ``(B, H, S, d)`` and ``(B, H, S, d_v)``; the tail owns them from then on.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values, self.length = keys, values, keys.shape[-2]

    @property
    def keys(self) -> Tensor:
        """``(B, H, length, d)``, a view."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """``(B, H, length, d_v)``, a view."""
        return self._values[:, :, : self.length]

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """The tensors kept alive, spare room included."""
        return self._keys, self._values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens to the spare room, or allocate room for ``TAIL_GROWTH`` more."""
        new = self.length + keys.shape[-2]
        # Under autograd, writing in place would break the graph of the previous step.
        follows = torch.is_grad_enabled() and (keys.requires_grad or self._keys.requires_grad)
        if follows or self.length == 0:
            self._keys = torch.cat([self.keys, keys], dim=-2)
            self._values = torch.cat([self.values, values], dim=-2)
        else:
            if new > self._keys.shape[-2] or self._frozen():
                self._keys, self._values = (_with_room(t, self.length, new + TAIL_GROWTH) for t in self.buffers)
            self._keys[:, :, self.length : new] = keys
            self._values[:, :, self.length : new] = values
        self.length = new

    def _frozen(self) -> bool:
        """Whether the buffers were made in inference mode, outside which they cannot be written to."""
        return not torch.compiler.is_compiling() and self._keys.is_inference() and not torch.is_inference_mode_enabled()

    def cut(self, start: int, stop: int) -> Tail:
        """Return a copy of the tokens from ``start`` to ``stop``, without spare room."""
        return Tail(_own(self.keys[:, :, start:stop]), _own(self.values[:, :, start:stop]))

    def beyond(self, start: int) -> Tail:
        """Return the tokens from ``start`` on: their keys copied, their values as a view (see `Compressed.owned`)."""
        values = self.values[:, :, start:]
        return Tail(_own(self.keys[:, :, start:]), values if values.numel() else _own(values))

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to both buffers; it must not change the second-last dimension."""
        self._keys, self._values = change(self._keys), change(self._values)


@dataclass(frozen=True)
class Compressed:
    """The older part of the cache; immutable, so references to it stay valid.

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

    @property
    def groups(self) -> tuple[Compressed, ...]:
        """Itself: all KV heads keep equally many tokens (see `grace_opt.hf.stores.channels.by_heads`)."""
        return (self,)

    def parts(self) -> dict[str, StoredTensor]:
        """Return all tensors kept alive, by name."""
        named = {
            "sink_keys": self.sink_keys,
            "pruned_keys": self.pruned_keys,
            "kept_indices": self.kept_indices,
            "old_values": self.values,
            "positions": self.positions,
        }
        return {name: part for name, part in named.items() if part is not None}

    def owned(self) -> Compressed:
        """Return a copy that owns its values, so that the prompt's can be freed.

        Compressing leaves the values in the prompt's tensor, which the running attention still holds: a copy at that
        moment would need additional memory.
        """
        return self if isinstance(self.values, QuantizedTokens) else replace(self, values=_own(self.values))

    def outside_inference(self) -> Compressed:
        """Return it with copies of tensors that were made in inference mode, which autograd cannot keep."""

        def unusable(part: StoredTensor) -> bool:
            return isinstance(part, Tensor) and part.is_inference()

        if not any(map(unusable, self.parts().values())):
            return self
        return self._changed(lambda part: part.clone() if unusable(part) else part)  # type: ignore[union-attr]

    def select(self, rows: Tensor) -> Compressed:
        """Select sequences of the batch in this order, repeated if listed repeatedly."""

        def pick(part: StoredTensor) -> StoredTensor:
            return part.select(rows) if isinstance(part, QuantizedTokens) else part[rows.to(part.device)]

        return self._changed(pick)

    def to(self, device: torch.device | str) -> Compressed:
        """Copy to another device without waiting."""
        return self._changed(lambda part: part.to(device, non_blocking=True))

    def _changed(self, change: Callable[[StoredTensor], StoredTensor]) -> Compressed:
        changed = {"values" if name == "old_values" else name: change(part) for name, part in self.parts().items()}
        index = None if self.index is None else self.index.changed(change)  # type: ignore[arg-type]
        return replace(self, **changed, index=index)  # type: ignore[arg-type]

    def _indexed(self) -> Compressed:
        """Return it with an index of the tokens that are stored now."""
        if self.index is None:
            return self
        return replace(self, index=self.index.remade(dequantized(self.pruned_keys)))

    def extended(self, tokens: Tail) -> Compressed:
        """Append newer tokens, reduced to the channels that the older ones keep."""
        kept = self.kept_indices
        narrow = gather_channels(tokens.keys, kept)
        positions = self.positions
        if positions is not None:
            more = torch.arange(self.length, self.length + tokens.length, device=positions.device, dtype=torch.int32)
            positions = torch.cat([positions, more.expand(*positions.shape[:2], -1)], dim=-1)
        return replace(
            self,
            length=self.length + tokens.length,
            pruned_keys=_joined(self.pruned_keys, narrow),
            values=_joined(self.values, tokens.values),
            positions=positions,
        )._indexed()

    def cropped(self, length: int) -> Compressed:
        """Keep only the first ``length`` tokens.

        Raises
        ------
        CacheError
            If the stored tokens cannot be cut there because some were evicted or they are stored in groups.
        """
        sinks = self.sink_keys.shape[-2]
        keys, values = self.pruned_keys, self.values
        if self.positions is not None or isinstance(keys, QuantizedTokens) or isinstance(values, QuantizedTokens):
            why = "in groups" if self.positions is None else "in another order"
            raise CacheError(
                f"the cache can be cropped to {self.length} tokens or more, not to {length}: the older tokens are "
                f"stored {why} (eviction, quantisation, or sink tokens of a padded batch); call reset() and start again"
            )
        return replace(
            self,
            length=length,
            sink_keys=_own(self.sink_keys[:, :, :length]),
            pruned_keys=_own(keys[:, :, : max(length - sinks, 0)]),
            values=_own(values[:, :, :length]),
        )._indexed()


def dequantized(part: StoredTensor) -> Tensor:
    """Return the stored numbers, dequantised if necessary."""
    return part.dequantize() if isinstance(part, QuantizedTokens) else part


def _joined(old: StoredTensor, new: Tensor) -> StoredTensor:
    if isinstance(old, QuantizedTokens):
        return old.append(new)
    return torch.cat([old, new], dim=-2)


def _own(view: Tensor) -> Tensor:
    return view.clone(memory_format=torch.contiguous_format)


def _with_room(tensor: Tensor, used: int, room: int) -> Tensor:
    larger = tensor.new_empty(*tensor.shape[:2], room, tensor.shape[-1])
    larger[:, :, :used] = tensor[:, :, :used]
    return larger
