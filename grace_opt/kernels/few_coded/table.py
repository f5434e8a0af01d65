"""`Lying`: where each coded token of a sequence lies, by address, and in which runs its tokens are scored and read.

Tokens are coded in the order of their classes, and each class has places of its own, whole words of them. Where a
token of the sequence is, its class says, which is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..coded.forms import COUNT, FIELDS, NEWEST
from ..coded.table import ITEMS, Numbers, Table, batched
from .forms import BITS, HEAD_STEP, IN_SEGMENT, MOST, OF_SEGMENT, PLACES_OF, SECOND, WORD

#: Fewest places of a run: its channels are sorted three times.
FEWEST = 1536


class Lying(NamedTuple):
    """Where the coded tokens of one sequence, or of several, are: addresses, so who keeps it must keep the codes alive.

    Attributes
    ----------
    table : Table
        Of the codes. Its items are, for each head: dense tokens, tokens that wait, and runs of places, of which an item
        names the first and the one after the last.
    firsts : array (all units,)
        The first place of each unit, or -1 if its tokens wait.
    segments : array (n, OF_SEGMENT)
        See `grace_opt.kernels.few_coded.forms.BITS`.
    places, tokens : list of int
        Of each sequence: places and tokens of a head, waiting ones not counted.
    parts : list of int
        Number of segments of each sequence.
    """

    table: Table
    firsts: Numbers
    segments: Numbers
    places: list[int]
    tokens: list[int]
    parts: list[int]

    @staticmethod
    def of(table: Table, heads: int, classes: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Lying:
        """Make it for a sequence.

        Parameters
        ----------
        table : Table
            Of its codes: those of the segments, then what waits.
        heads : int
        classes : sequence of Tensor
            Of each segment, ``(2, H, ⌈T/8⌉)`` uint8: the bits of each token's class, in the order of the sequence.
        counts : sequence of sequence of int
            Of each segment: tokens of each class.
        """
        units = table.units.reshape(heads, table.most, FIELDS)
        coded = [count for each in counts for count in each if count]
        firsts, place, segments = np.full((heads, table.most), -1, np.int64), 0, []
        assert (units[:, : len(coded), NEWEST] < 0).all()
        assert (units[..., : len(coded), COUNT] == coded).all()
        starts = np.cumsum([0, *(-(-count // WORD) * WORD for count in coded)])
        firsts[:, : len(coded)] = starts[:-1]
        unit = 0
        for bits, of_classes in zip(classes, counts, strict=True):
            fields = np.zeros(OF_SEGMENT, np.int64)
            fields[[BITS, HEAD_STEP, SECOND]] = bits.data_ptr(), bits.stride(1), bits.stride(0)
            fields[IN_SEGMENT] = sum(of_classes)
            for number, count in enumerate(of_classes):
                fields[PLACES_OF + number] = starts[unit]
                unit += count > 0
            segments.append(fields)
        place = int(starts[-1])
        some = min(max(-(-place * heads // ITEMS), FEWEST), MOST)
        some = -(-some // WORD) * WORD
        items = []
        for h in range(heads):
            first, behind, last = h * table.most, h * table.most + len(coded), (h + 1) * table.most
            items.append([h, -1, -1, 0, 0])
            if behind < last:
                items.append([h, behind, last, 0, int(units[h, len(coded) :, COUNT].sum())])
            items += [[h, first, behind, start, min(start + some, place)] for start in range(0, place, some)]
        told = replace(table, items=np.array(items, np.int64).reshape(-1, 5))
        every = np.array(segments, np.int64).reshape(-1, OF_SEGMENT)
        return Lying(told, firsts.ravel(), every, [place], [sum(coded)], [len(segments)])

    @staticmethod
    def together(each: Sequence[Lying], heads: int) -> Lying:
        """Return that of several sequences."""
        if len(each) == 1:
            return each[0]
        return Lying(
            batched([one.table for one in each], heads),
            np.concatenate([one.firsts for one in each]),
            np.concatenate([one.segments for one in each]),
            *([number for one in each for number in getattr(one, name)] for name in ("places", "tokens", "parts")),
        )
