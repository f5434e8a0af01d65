"""`ByHeads`: the older tokens of a layer whose KV heads keep different numbers of them.

When: a budget is divided among heads, too (`grace_opt.hf.LayerBudgets`). Neighbouring heads that keep equally many are
stored together, as a `Compressed` of these heads alone, so nothing is padded. A kernel reads one group after the other;
any other attention function gets all heads at once, padded for as long as it runs.

Source: Ada-KV (arXiv 2407.11550) for heads with different budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from .storage import Compressed, StoredTensor, Tail


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
class ByHeads:
    """Groups of heads, in order; it has the methods of `Compressed` that a layer calls.

    Attributes
    ----------
    groups : tuple of Compressed
        At least two; each of a run of KV heads, and of the same sequences.
    """

    groups: tuple[Compressed, ...]

    index = None  # nothing is read in part

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
        """See `Compressed.owned`."""
        return self._changed(Compressed.owned)

    def outside_inference(self) -> ByHeads:
        """See `Compressed.outside_inference`."""
        return self._changed(Compressed.outside_inference)

    def select(self, rows: Tensor) -> ByHeads:
        """Select sequences of the batch in this order, repeated if listed repeatedly."""
        return self._changed(lambda group: group.select(rows))

    def to(self, device: torch.device | str) -> ByHeads:
        """Copy to another device without waiting."""
        return self._changed(lambda group: group.to(device))

    def extended(self, tokens: Tail) -> ByHeads:
        """Append newer tokens to all heads."""
        keys, values = tokens.keys, tokens.values
        return ByHeads(
            tuple(group.extended(Tail(keys[:, heads], values[:, heads])) for group, heads in self.by_heads())
        )

    def cropped(self, length: int) -> ByHeads:
        """Raise `CacheError`: heads differ only where tokens were evicted."""
        return self._changed(lambda group: group.cropped(length))

    def _changed(self, change: Callable[[Compressed], Compressed]) -> ByHeads:
        return ByHeads(tuple(map(change, self.groups)))
