"""How many tokens of a block each class takes, so that tokens after the prompt have no more bits than the prompt's had.

When: a block of newer tokens is appended to a `CodedRow`. Codes of newer tokens need no means, widths and scales of
their own, and what these took per token of the prompt pays for the block's corrections
(:mod:`grace_opt.hf.bits.drift`). Of a long prompt that is little: then fewer of the block's tokens get many bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .bitplanes import PER_BYTE
from .classes import CLASS_STEP, class_sizes
from .codes import Codes
from .drift import correction_bits, corrections


@dataclass(frozen=True)
class Spent:
    """Bits that a row's keys, or its values, take.

    Attributes
    ----------
    planes : tuple of int
        Number of bit planes of each class.
    counts : tuple of int
        Number of tokens of each class.
    others : int
        Bits of parameters, of corrections and of the prompt's own basis.
    heads, width : int
    per_token : float
        What a token of the prompt took, before there were newer ones.
    """

    planes: tuple[int, ...]
    counts: tuple[int, ...]
    others: int
    heads: int
    width: int
    per_token: float

    @classmethod
    def of(cls, codes: Codes, prompt: Sequence[int], decode: Tensor | None) -> Spent:
        """Count what codes take; `prompt` has the number of its tokens in each class, `decode` is its own basis."""
        planes = tuple(len(each) for each in codes.planes)
        others = codes.nbytes - sum(each.nbytes for each in codes.planes) + (0 if decode is None else decode.nbytes)
        before = others - (0 if codes.drift is None else sum(each.nbytes for each in vars(codes.drift).values()))
        bits = PER_BYTE * before + _plane_bits(planes, prompt)
        heads, width = codes.means.shape
        return cls(planes, codes.counts, PER_BYTE * others, heads, width, bits / sum(prompt))

    def corrections(self, kind: Literal["keys", "values"], more: int) -> int:
        """Return how many means, and scales, of a head a block of `more` tokens corrects."""
        return corrections(kind, self.width, len(self.counts), self.per_token * more / self.heads)

    def allows(self, sizes: Sequence[int], corrected: int) -> bool:
        """Return whether tokens still take no more than the prompt's did, after a block with `sizes` in each class."""
        together = [have + new for have, new in zip(self.counts, sizes, strict=True)]
        added = self.heads * corrected * correction_bits(self.width, len(self.counts))
        return _plane_bits(self.planes, together) + self.others + added <= self.per_token * sum(together)


def affordable_sizes(have: Sequence[int], more: int, parts: Sequence[tuple[Spent, int]]) -> tuple[int, ...]:
    """Return how many tokens of a block each class takes: the shares that classes have, or less where bits are few.

    Parameters
    ----------
    have : sequence of int
        Number of tokens of each class.
    more : int
        Number of tokens of the block.
    parts : sequence of (Spent, int)
        Of keys and of values, with the number of their corrections.
    """
    sizes = list(grown_sizes(have, more))
    while any(sizes[:-1]) and not all(spent.allows(sizes, corrected) for spent, corrected in parts):
        # From the last class that can give to the next one, whose tokens take fewer bits.
        place = max(number for number, size in enumerate(sizes[:-1]) if size)
        step = min(sizes[place], CLASS_STEP)
        sizes[place], sizes[place + 1] = sizes[place] - step, sizes[place + 1] + step
    return tuple(sizes)


def grown_sizes(have: Sequence[int], more: int) -> tuple[int, ...]:
    """Return how many of `more` tokens each class takes, so that the classes keep their shares.

    Examples
    --------
    >>> grown_sizes((200,), 64)
    (64,)
    """
    sizes, left = [], more
    for old, new in zip(have[:-1], class_sizes(sum(have) + more, len(have)), strict=False):
        sizes.append(min(max(new - old, 0), left))
        left -= sizes[-1]
    return (*sizes, left)


def _plane_bits(planes: Sequence[int], counts: Sequence[int]) -> int:
    """Return the bits of planes that hold so many tokens of each class, in whole bytes."""
    return sum(number * PER_BYTE * -(-count // PER_BYTE) for number, count in zip(planes, counts, strict=True))
