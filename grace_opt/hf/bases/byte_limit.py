"""`ByteLimit`: the bytes that a whole cache never exceeds, and what is known of the tokens to come.

The layers of a cache share one: all hold equally many tokens, so what one layer may take of a sequence follows from
counts alone, and every layer decides alike (:mod:`grace_opt.hf.stores.coded.room`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class BitsAt(NamedTuple):
    """When bits were chosen: by how many tokens, how many per element, and the cache's bytes then."""

    tokens: int
    bits: float
    nbytes: int


@dataclass
class ByteLimit:
    """A limit on the bytes of a whole cache.

    Attributes
    ----------
    nbytes : int
        The limit.
    layers : int
        Number of layers that are coded.
    first : int
        Position of the first of them.
    elsewhere : int
        Most bytes that all other layers take, for each sequence.
    until : int, optional
        How many tokens the text will have, at most; None if nobody knows.
    chosen : list of BitsAt
        When bits were chosen.
    """

    nbytes: int
    layers: int
    first: int
    elsewhere: int = 0
    until: int | None = None
    chosen: list[BitsAt] = field(default_factory=list)

    def note(self, layer: int, tokens: int, bits: float) -> None:
        """Take down which bits were chosen: the first layer does, for all; of several rows, the fewest."""
        if layer != self.first:
            return
        if self.chosen and self.chosen[-1].tokens == tokens:
            bits = min(bits, self.chosen.pop().bits)
        self.chosen.append(BitsAt(tokens, bits, 0))

    def share(self, sequences: int) -> float:
        """Return the bytes of one layer of one sequence."""
        return (self.nbytes / sequences - self.elsewhere) / self.layers

    def whole(self, share: float, sequences: int) -> float:
        """Return the limit that leaves one layer of one sequence so many bytes."""
        return sequences * (share * self.layers + self.elsewhere)
