"""`CodedParts`: what a store of coded tokens consists of, for what computes attention over them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...._util.arrays import to_device
from ...bases.basis import Basis
from ...bases.divergence import Divergence
from ..store import Store
from .row import CodedRow


class Received:
    """The attention that waiting tokens and the tail's received from later queries, added up step by step.

    Attributes
    ----------
    sums : Tensor or None
        ``(B, H, 3, n)``: see `grace_opt.hf.bases.importance.tail_attention`.
    """

    def __init__(self, sums: Tensor | None = None) -> None:
        self.sums = sums

    def add(self, now: Tensor) -> None:
        """Add a step's attention on the newest tokens, ``(B, H, 3, n)``, of which the first were there before."""
        if (before := self.on(now.device)) is not None:
            now[..., : before.shape[-1]] += before
        self.sums = now

    def on(self, device: torch.device) -> Tensor | None:
        """Return the sums on the device of a step: an offloading cache may have moved them away since its update."""
        return None if self.sums is None else to_device(self.sums, device)

    def of(self, blocks: int, tokens: Tensor) -> Tensor:
        """Return the sums; zeros of the first `blocks` tokens if nothing is known, as in old files."""
        if self.sums is not None:
            return self.sums
        return torch.zeros(*tokens.shape[:2], 3, blocks, dtype=torch.float32, device=tokens.device)


@dataclass(frozen=True)
class CodedParts(Store, ABC):
    """Rows of codes, one for each sequence of the batch, and their bases.

    Attributes
    ----------
    length : int
        Number of tokens of the sequence that this covers, padding included; with eviction, more than are stored.
    rows : tuple of CodedRow
    bases : (Basis, Basis) or None
        The model's bases of keys and values, which belong to no prompt; None without any.
    positions : Tensor or None
        ``(B, H, stored)`` int32: positions of the stored tokens in the sequence; None means all tokens, in order.
    received : Received
        The attention on the newest tokens, which decides their classes.
    divergence : Divergence or None
        How unlike the calibration the prompt is, that of its most unlike row; None if nobody has measured it.
    coded, waiting : int
        Largest number of coded tokens of a row, and number of newest tokens that wait for their classes.
    trellis : bool
        Whether codes are those of a trellis: all of them, or none.
    """

    length: int
    rows: tuple[CodedRow, ...]
    bases: tuple[Basis, Basis] | None
    positions: Tensor | None = None
    received: Received = field(default_factory=Received, compare=False, repr=False)
    divergence: Divergence | None = field(default=None, compare=False)
    coded: int = field(init=False)
    waiting: int = field(init=False)
    trellis: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "coded", max((row.tokens for row in self.rows), default=0))
        object.__setattr__(self, "waiting", max((row.waits for row in self.rows), default=0))
        trellis = any(segment.keys.trellis for row in self.rows for segment in row.segments)
        object.__setattr__(self, "trellis", trellis)

    @property
    def stored(self) -> int:
        """Number of places stored per KV head, padding included."""
        return self.rows[0].length

    def columns(self, row: int) -> Tensor | None:
        """Return where a row's stored places are in the sequence, ``(H, stored)``; None for all, in order."""
        return None if self.positions is None else self.positions[row]

    def own_rows(self) -> Iterable[CodedRow]:
        """Return every row once, however many sequences share it."""
        return {id(row): row for row in self.rows}.values()
