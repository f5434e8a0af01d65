"""`Compressed`: a store of tokens without some channels of their keys, in 16 bits or fewer.

All tensors own exactly their bytes. Slices are copied, because a view keeps the whole original alive and would make the
memory report wrong.

Source: ThinK (arXiv 2407.21018); KIVI (arXiv 2402.02750) for quantised storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....errors import CacheError
from ....kernels.cache.gather import gather_channels
from ...models.attention import Attended
from ...models.observation import Observation
from ..packed.masked import with_real_alone
from ..packed.tokens import QuantizedTokens, StoredTensor, dequantized
from ..plan import LayerPlan
from ..saved import apart
from ..store import Step
from ..tail import Tail, own
from .attention import scatter_channels
from .fused import fused_attention
from .index import ReadIndex
from .parts import ChannelParts
from .reading import read_attention


@dataclass(frozen=True)
class Compressed(ChannelParts):
    """Old tokens of which all KV heads keep equally many; the fields are those of `ChannelParts`."""

    @property
    def compressed(self) -> int:
        """Number of stored tokens that have lost channels, or bits."""
        return self.pruned_keys.shape[-2]

    def needs_our_attention(self, fused: bool) -> bool:
        """Whether only grace_opt's attention function can read it."""
        return fused or self.positions is not None

    def kept_channels(self) -> Tensor:
        """Return the indices of the channels that keys keep, ``(B, H, d')``."""
        return self.kept_indices

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
        return self if isinstance(self.values, QuantizedTokens) else replace(self, values=own(self.values))

    def changed(self, change: Callable[[Any], Any]) -> Compressed:
        """Return it with a function applied to all tensors."""
        changed = {"values" if name == "old_values" else name: change(part) for name, part in self.parts().items()}
        index = None if self.index is None else self.index.changed(change)
        return replace(self, **changed, index=index)

    def with_index(self, index: ReadIndex) -> Compressed:
        """Return it with what finds the tokens to read."""
        return replace(self, index=index)

    def _indexed(self) -> Compressed:
        """Return it with an index of the tokens that are stored now."""
        if self.index is None:
            return self
        return replace(self, index=self.index.remade(dequantized(self.pruned_keys)))

    def extended(self, plan: LayerPlan, tokens: Tail) -> Compressed:
        """Append newer tokens, reduced to the channels that the older ones keep."""
        narrow = gather_channels(tokens.keys, self.kept_indices)
        return replace(
            self,
            length=self.length + tokens.length,
            pruned_keys=_joined(self.pruned_keys, narrow),
            values=_joined(self.values, tokens.values),
            positions=self.positions_with(tokens.length),
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
            sink_keys=own(self.sink_keys[:, :, :length]),
            pruned_keys=own(keys[:, :, : max(length - sinks, 0)]),
            values=own(values[:, :, :length]),
        )._indexed()

    def real_alone(self, plan: LayerPlan, over: Observation, tail: Tail) -> Tail:
        """Return the tail with real numbers alone, if it will share scales."""
        config = plan.config
        if over.valid is None or config.quantize is None or config.tail_block is None:
            return tail
        newer = tail.length + self.length - over.length  # candidates, behind the prompt
        real = functional.pad(over.valid[:, None, self.length :], (0, newer), value=True)
        return Tail(with_real_alone(tail.keys, real), with_real_alone(tail.values, real))

    def dense(self, tail: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys with zeros in the pruned channels, and all values."""
        return scatter_channels(self, tail, value)

    def attend(self, step: Step) -> Attended | None:
        """Compute attention on the kept channels, over few of the tokens with ``read=``."""
        given = step.module, step.query, step.tail, step.value, step.mask, self
        if self.index is not None and self.pruned_keys.shape[2]:
            few: Attended = read_attention(*given, step.tally, step.wants_weights, **step.arguments)
            return few
        return fused_attention(*given, step.wants_weights, **step.arguments)

    def held(self) -> dict[str, StoredTensor]:
        """Return all tensors kept alive, by name."""
        reading = {} if self.index is None else self.index.all_tensors()
        return self.parts() | {f"reading.{name}": part for name, part in reading.items()}

    def to_file(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and plain values; what finds tokens to read is made again from the keys."""
        tensors, quantized = apart(self.parts())
        about: dict[str, Any] = {} if self.index is None else {"lead": self.index.lead}
        if self.index is not None and self.index.padding is not None:
            tensors["padding"] = self.index.padding
        about["length"] = self.length
        return tensors, about | ({"quantized": quantized} if quantized else {})


def _joined(old: StoredTensor, new: Tensor) -> StoredTensor:
    if isinstance(old, QuantizedTokens):
        return old.append(new)
    return torch.cat([old, new], dim=-2)
