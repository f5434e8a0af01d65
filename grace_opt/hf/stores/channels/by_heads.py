"""`ByHeads`: the older tokens of a layer whose KV heads keep different numbers of them.

When: a budget is divided among heads, too (`grace_opt.hf.LayerBudgets`). Neighbouring heads that keep equally many are
stored together, as a `Compressed` of these heads alone, so nothing is padded. A kernel reads one group after the other;
any other attention function gets all heads at once, padded for as long as it runs.

Source: Ada-KV (arXiv 2407.11550) for heads with different budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...models.attention import Attended
from ...models.observation import Observation
from ..packed.tokens import StoredTensor
from ..plan import LayerPlan
from ..saved import apart, group_prefix
from ..store import Step, Store
from ..tail import Tail
from .fused import fused_attention
from .storage import Compressed


def some_heads(stored: Compressed, heads: slice) -> Compressed:
    """Return views of some KV heads' tokens, which are not quantised."""

    def own(part: StoredTensor) -> Tensor:
        assert isinstance(part, Tensor)
        return part[:, heads]

    positions = stored.positions
    return replace(
        stored,
        sink_keys=own(stored.sink_keys),
        pruned_keys=own(stored.pruned_keys),
        kept_indices=own(stored.kept_indices),
        values=own(stored.values),
        positions=positions if positions is None or positions.shape[1] == 1 else positions[:, heads],
    )


@dataclass(frozen=True)
class ByHeads(Store):
    """Groups of heads, in order.

    Attributes
    ----------
    groups : tuple of Compressed
        At least two; each of a run of KV heads, and of the same sequences.
    """

    groups: tuple[Compressed, ...]

    needs_mask = True

    @property
    def length(self) -> int:
        """Number of tokens of the sequence that this covers."""
        return self.groups[0].length

    @property
    def stored(self) -> int:
        """Number of tokens that the head with most of them stores."""
        return max(group.stored for group in self.groups)

    @property
    def positions(self) -> Tensor:
        """``(B, H, stored)`` int32: positions of the stored tokens, behind as many -1 as a head has fewer."""
        rows = []
        for group, heads in self.by_heads():
            places = group.positions
            if places is None:
                places = torch.arange(group.stored, device=group.values.device, dtype=torch.int32).expand(
                    group.values.shape[0], 1, -1
                )
            places = places.expand(-1, heads.stop - heads.start, -1)
            rows.append(functional.pad(places, (self.stored - group.stored, 0), value=-1))
        return torch.cat(rows, dim=1)

    def by_heads(self) -> Iterator[tuple[Compressed, slice]]:
        """Return each group with the KV heads that it has."""
        start = 0
        for group in self.groups:
            stop = start + group.kept_indices.shape[1]
            yield group, slice(start, stop)
            start = stop

    def parts(self) -> dict[str, StoredTensor]:
        """Return all tensors kept alive, by name and number of the group."""
        return {
            f"{name}.{number}": part for number, group in enumerate(self.groups) for name, part in group.parts().items()
        }

    def owned(self) -> ByHeads:
        """See `Store.owned`."""
        return self._mapped(Compressed.owned)

    def outside_inference(self) -> ByHeads:
        """See `Store.outside_inference`."""
        return self._mapped(Compressed.outside_inference)

    def changed(self, change: Callable[[Any], Any]) -> ByHeads:
        """Return it with a function applied to all tensors."""
        return self._mapped(lambda group: group.changed(change))

    def real_alone(self, plan: LayerPlan, over: Observation, tail: Tail) -> Tail:
        """See `Store.real_alone`."""
        return self.groups[0].real_alone(plan, over, tail)

    def needs_our_attention(self, fused: bool) -> bool:
        """Whether only grace_opt's attention function can read it: always."""
        return True

    @property
    def compressed(self) -> int:
        """Number of compressed tokens of the head with most of them."""
        return max(group.compressed for group in self.groups)

    def kept_channels(self) -> Tensor:
        """Return the indices of the channels that keys keep, ``(B, H, d')``."""
        return torch.cat([group.kept_indices for group in self.groups], dim=1)

    def dense(self, tail: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys of full width and values; a head that stores fewer tokens begins with zeros."""
        rows = [
            [
                functional.pad(part, (0, 0, self.stored - group.stored, 0))
                for part in group.dense(tail[:, heads], value[:, heads])
            ]
            for group, heads in self.by_heads()
        ]
        keys, values = (torch.cat(part, dim=1) for part in zip(*rows, strict=True))
        return keys, values

    def attend(self, step: Step) -> Attended | None:
        """Compute attention on the kept channels, one group of heads after the other; None if weights are needed."""
        if step.wants_weights:
            return None
        group, found, mask = step.query.shape[1] // step.tail.shape[1], [], step.mask
        for part, heads in self.by_heads():
            asking = slice(group * heads.start, group * heads.stop)
            own = mask if mask is None or mask.shape[1] == 1 else mask[:, asking]
            newer = step.tail[:, heads], step.value[:, heads]
            output, _ = fused_attention(step.module, step.query[:, asking], *newer, own, part, False, **step.arguments)
            found.append(output)
        return torch.cat(found, dim=2), None

    def to_file(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and plain values; each group's with a prefix."""
        named = {
            f"{group_prefix(number)}{name}": part
            for number, group in enumerate(self.groups)
            for name, part in group.parts().items()
        }
        tensors, quantized = apart(named)
        about = {"heads": [group.kept_indices.shape[1] for group in self.groups], "length": self.length}
        return tensors, about | ({"quantized": quantized} if quantized else {})

    def extended(self, plan: LayerPlan, tokens: Tail) -> ByHeads:
        """Append newer tokens to all heads."""
        keys, values = tokens.keys, tokens.values
        return ByHeads(
            tuple(group.extended(plan, Tail(keys[:, heads], values[:, heads])) for group, heads in self.by_heads())
        )

    def cropped(self, length: int) -> ByHeads:
        """Raise `CacheError`: heads differ only where tokens were evicted."""
        return self._mapped(lambda group: group.cropped(length))

    def _mapped(self, change: Callable[[Compressed], Compressed]) -> ByHeads:
        return ByHeads(tuple(map(change, self.groups)))
