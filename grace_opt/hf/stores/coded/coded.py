"""`CodedTokens`: the coded part of one layer, beside the dense tail; what `Compressed` is for pruned keys.

Immutable, like `Compressed`: rows are shared by beams and copies, and replaced when they grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ....errors import CacheError
from ...bases.basis import Basis
from ..plan import LayerPlan
from .row import CodedRow


def added_attention(sums: Tensor | None, now: Tensor) -> Tensor:
    """Add to a step's attention on the newest tokens, ``(B, H, 3, n)``, what the first of them have received before."""
    if sums is not None:
        now[..., : sums.shape[-1]] += sums
    return now


@dataclass(frozen=True)
class CodedTokens:
    """The older tokens of a layer, a `CodedRow` for each sequence of the batch.

    Attributes
    ----------
    length : int
        Number of tokens of the sequence that this covers, padding included; with eviction, more than are stored.
    rows : tuple of CodedRow
    bases : (Basis, Basis) or None
        The model's bases of keys and values, which belong to no prompt; None if rows have their own, or none.
    positions : Tensor or None
        ``(B, H, stored)`` int32: positions of the stored tokens in the sequence; None means all tokens, in order.
    coded, waiting : int
        Largest number of coded tokens of a row, and number of newest tokens that wait for their classes.
    trellis : bool
        Whether codes are those of a trellis: all of them, or none.
    """

    length: int
    rows: tuple[CodedRow, ...]
    bases: tuple[Basis, Basis] | None
    positions: Tensor | None = None
    coded: int = field(init=False)
    waiting: int = field(init=False)
    trellis: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "coded", max((row.tokens for row in self.rows), default=0))
        object.__setattr__(self, "waiting", max((row.waits for row in self.rows), default=0))
        woven = any(segment.keys.trellis for row in self.rows for segment in row.segments)
        object.__setattr__(self, "trellis", woven)

    @property
    def stored(self) -> int:
        """Number of places stored per KV head, padding included."""
        return self.rows[0].length

    def full_width(self, tail: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values, dense: the coded ones, then the tail's ``(B, H, S_t, d)``."""
        dense = [row.dense(self.bases) for row in self.rows]
        keys = torch.cat([torch.stack([keys for keys, _ in dense]), tail], dim=2)
        return keys, torch.cat([torch.stack([values for _, values in dense]), value], dim=2)

    def settled(self, plan: LayerPlan, received: Tensor) -> CodedTokens:
        """Give the n oldest waiting tokens their classes; `received` ``(B, H, 3, n)`` is the attention on them."""
        rows = (row.settled(plan, received[number], self.bases) for number, row in enumerate(self.rows))
        return replace(self, rows=tuple(rows))

    def extended(self, keys: Tensor, values: Tensor) -> CodedTokens:
        """Append newer tokens ``(B, H, n, d)``, which wait for their classes."""
        keys, values = keys.detach(), values.detach()  # codes have no gradients
        rows = tuple(row.appended(keys[number], values[number], self.bases) for number, row in enumerate(self.rows))
        positions = self.positions
        if positions is not None:
            more = torch.arange(self.length, self.length + keys.shape[2], device=positions.device, dtype=torch.int32)
            positions = torch.cat([positions, more.expand(*positions.shape[:2], -1)], dim=-1)
        return replace(self, length=self.length + keys.shape[2], rows=rows, positions=positions)

    def select(self, rows: Tensor) -> CodedTokens:
        """Select sequences of the batch in this order, repeated if listed repeatedly; nothing is copied."""
        positions = None if self.positions is None else self.positions[rows.to(self.positions.device)]
        return replace(self, rows=tuple(self.rows[index] for index in rows.tolist()), positions=positions)

    def to(self, device: torch.device | str) -> CodedTokens:
        """Copy to another device without waiting; rows that are shared stay so."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True), device)

    def owned(self) -> CodedTokens:
        """Return itself: codes are no views of the prompt's tensors."""
        return self

    def cropped(self, length: int) -> CodedTokens:
        """Refuse: tokens cannot be taken out of their classes again."""
        raise CacheError(
            f"the cache can be cropped to {self.length} tokens or more, not to {length}: the older tokens are coded "
            "(bits=); call reset() and start again"
        )

    def parts(self) -> dict[str, Tensor]:
        """Return all tensors kept alive, by name; the model's bases are not among them."""
        found = {
            f"rows.{number}.{name}": t
            for number, row in enumerate(self.rows)
            for name, t in (row.tensors() | row.table_tensors()).items()
        }
        return found if self.positions is None else {**found, "positions": self.positions}

    def sizes(self) -> Counter[str]:
        """Return bytes by kind, and numbers of coded elements; rows that several sequences share count once."""
        found: Counter[str] = Counter()
        for row in self.own_rows():
            for number, (name, sinks, own) in enumerate(
                (("key", row.sink_keys, row.key_decode), ("value", row.sink_values, row.value_decode))
            ):
                every = [(each.keys, each.values)[number] for each in row.segments]
                every += [] if row.waiting is None else [row.waiting[number]]
                planes = sum(plane.nbytes for codes in every for plane in codes.planes)
                found[f"{name} codes"] += planes
                found[f"{name} parameters"] += sum(codes.nbytes for codes in every) - planes
                found[f"{name} sinks"] += sinks.nbytes
                found[f"{name} bases"] += 0 if own is None else own.nbytes
                found[f"{name} elements"] += len(sinks) * sinks.shape[-1] * row.tokens
            found["classes"] += sum(each.classes.nbytes for each in row.segments)
            found["classes"] += 0 if row.present is None else row.present.nbytes
            found["tables"] += sum(part.nbytes for part in row.table_tensors().values())
        found["positions"] = 0 if self.positions is None else self.positions.nbytes
        return found

    def own_rows(self) -> Iterable[CodedRow]:
        """Return every row once, however many sequences share it."""
        return {id(row): row for row in self.rows}.values()

    def _changed(self, change: Callable[[Tensor], Tensor], device: torch.device | str) -> CodedTokens:
        made = {id(row): row.map(change) for row in self.own_rows()}
        bases = None if self.bases is None else (self.bases[0].to(device), self.bases[1].to(device))
        positions = None if self.positions is None else change(self.positions)
        return replace(self, rows=tuple(made[id(row)] for row in self.rows), bases=bases, positions=positions)
