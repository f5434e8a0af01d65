"""`Room`: what one layer of one sequence may take under a limit of bytes, and how that is divided.

Dense tokens come first: the sinks, and a tail of the recent window, a block that is not full yet, and the room that the
tail grows by. Of what is left, at most a quarter is for tokens that wait for their classes; the rest is for those that
have them. Tables of addresses and positions, by which codes are read where they lie, are counted with the tokens.

Every layer of a cache has as many tokens, in as many segments: so all come to the same numbers, before any has coded
anything. The sum over layers is then below the limit, as the bits of layers and heads have the mean that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from ....errors import CacheError
from ....kernels.cache.coded.forms import FIELDS
from ....kernels.cache.coded.table import FEWEST
from ...bases.byte_limit import ByteLimit
from ...bases.classes import class_sizes
from ...bases.codebooks import WIDTHS
from ...settings.bits import MAX_CODE_BITS
from ..plan import LayerPlan
from .bitplanes import PER_BYTE
from .codes import PARAMETER_BITS, fixed_bits
from .segment import segment_bits
from .waiting import MORE_BITS, NEWEST, SETTLED, waiting_width

#: What waiting tokens may take of the bytes that are not dense, unless too few blocks would wait.
WAITING = 0.25
#: At least so many blocks wait: half of them are coded at once.
BLOCKS = 2
#: Numbers of bits up to which waiting tokens have the same number, descending, and the fewest that are given.
MOST_BITS = (
    float(MAX_CODE_BITS),
    *sorted({width - more for more in MORE_BITS for width in WIDTHS if 0 < width - more < 5}, reverse=True),
)
#: Where bits have to become fewer, they become so much fewer than would do, so that it happens seldom.
STEP = 0.875
#: Bytes of the attention that a newest token of a head has received, and of a class's two weights.
RECEIVED, WEIGHTS = 3 * 4, 2 * 4
#: Bytes of a unit and of a task in a table of addresses.
UNIT, TASK = 8 * FIELDS, 8 * 5


@dataclass(frozen=True)
class Room:
    """What a layer of a sequence may take.

    Attributes
    ----------
    limit : ByteLimit
    sequences : int
        Number of sequences that share the limit.
    heads, width, depth, itemsize : int
        Number of KV heads; numbers of a key and of a value; bytes of a number that is dense.
    recent, block : int
        Tokens of the recent window, and of a block of newer ones.
    turned : bool
        Whether keys leave out a mean that turns, which takes the position of every token.
    left : int or None
        Tokens that the text will have beyond those that are stored, at most; None if nobody knows.
    """

    limit: ByteLimit
    sequences: int
    heads: int
    width: int
    depth: int
    itemsize: int
    recent: int
    block: int
    turned: bool
    left: int | None = None

    @classmethod
    def of(
        cls, plan: LayerPlan, keys: torch.Tensor, values: torch.Tensor, sequences: int, turned: bool, stored: int
    ) -> Room:
        """Return that of a layer with such keys ``(H, n, d)`` and values, of which some tokens are stored."""
        assert plan.bits is not None
        assert plan.bits.limit is not None
        assert plan.config.tail_block is not None
        heads, _, width = keys.shape
        return cls(
            plan.bits.limit,
            sequences,
            heads,
            width,
            values.shape[-1],
            keys.element_size(),
            plan.config.recent_window,
            plan.config.tail_block,
            turned,
            None if plan.bits.limit.until is None else max(plan.bits.limit.until - stored, 0),
        )

    @property
    def token(self) -> int:
        """Bytes of a dense token."""
        return self.heads * (self.width + self.depth) * self.itemsize

    @property
    def elements(self) -> int:
        """Numbers of a token."""
        return self.heads * (self.width + self.depth)

    def undivided(self, sinks: int) -> float:
        """Return the bytes for all that is not dense."""
        return self.limit.share(self.sequences) - self._dense(sinks)

    def _dense(self, sinks: int) -> int:
        tail = self.recent + self.block if self.left is None else min(self.recent + self.block, self.left)
        turned = self.heads * (self.width * 4 + PARAMETER_BITS // PER_BYTE) * self.turned
        return self.token * (sinks + tail) + self.heads * RECEIVED * tail + turned + 2 * self.heads * TASK

    def positions(self, length: int) -> int:
        """Return the bytes of each coded token's position and task."""
        wide = 2 if length <= torch.iinfo(torch.int16).max else 4
        return self.heads * wide * self.turned

    def waiting_block(self, bits: tuple[float, float], length: int) -> float:
        """Return the bytes of a block that waits where so many bits are asked for."""
        return self.waiting_codes(bits) + self.beside_waiting(length)

    def beside_waiting(self, length: int) -> float:
        """Return the bytes beside its codes that a waiting block takes."""
        return self.heads * (UNIT + RECEIVED * self.block) + self.positions(length) * self.block

    def waiting_codes(self, bits: tuple[float, float]) -> float:
        """Return the bytes of the codes alone."""
        codes = 0.0
        for kind, channels in enumerate((self.width, self.depth)):
            plane = -(-self.block // PER_BYTE) * PER_BYTE
            numbers = channels * (waiting_width(kind, bits[kind]) * plane + PARAMETER_BITS)
            codes += (fixed_bits(1, 1, channels) + numbers) / 8
        return self.heads * codes

    def may_wait(self, undivided: float, bits: tuple[float, float], length: int) -> int:
        """Return how many blocks may wait where so many bits are asked for."""
        blocks = int(WAITING * undivided / self.waiting_block(bits, length))
        return max(min(blocks, -(-SETTLED // self.block)), BLOCKS)

    def for_waiting(self, undivided: float, bits: tuple[float, float], length: int, held: float = 0.0) -> float:
        """Return the bytes that are kept for tokens that wait; those that wait now take `held`."""
        block = self.waiting_block(bits, length)
        most = self.may_wait(undivided, bits, length) * block
        return max(most if self.left is None else min(most, held + self.to_come * block), held)

    @property
    def to_come(self) -> int:
        """Blocks that will leave the recent window, where that is known."""
        return 0 if self.left is None else max(self.left - self.recent, 0) // self.block

    def beside(self, segments: Sequence[Sequence[int]], length: int) -> float:
        """Return the bytes beside codes that segments take, of so many tokens in each class."""
        classes, tokens = sum(map(len, segments)), sum(map(sum, segments))
        tasks = TASK * (2 * tokens / FEWEST + len(segments))
        padding = -(-length // PER_BYTE)
        return self.heads * (classes * (UNIT + WEIGHTS) + tasks) + self.positions(length) * tokens + padding

    def fixed(self, segments: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Return the bits that keys, and values, of segments take whatever their widths are."""
        keys, values = (
            self.heads * sum(segment_bits(sum(counts), len(counts), width) for counts in segments)
            for width in (self.width, self.depth)
        )
        return keys, values

    def mean_bits(self, segments: Sequence[Sequence[int]], sinks: int, length: int, held: float = 0.0) -> float:
        """Return the most bits per element that segments may have when the sequence has so many tokens.

        Parameters
        ----------
        segments : sequence of sequence of int
            Number of tokens in each class of each.
        sinks, length : int
            Number of dense first tokens, and of all.
        held : float
            Bytes of the tokens that wait now, who may have more bits than those to come.

        Raises
        ------
        CacheError
            If what is dense, means and widths take more than there is.
        """
        undivided, tokens = self.undivided(sinks), sum(map(sum, segments))
        beside, fixed = self.beside(segments, length), self.fixed(segments)
        sizes = tokens * self.heads * self.width, tokens * self.heads * self.depth
        # Keys and values have the same mean: neither may be left with less than it takes in any case.
        least = max((own / of for own, of in zip(fixed, sizes, strict=True)), default=0.0) if tokens else 0.0
        found = 0.0
        # Those that wait have the more bits the more are asked for: the most that leave enough for them.
        for bits in MOST_BITS:
            waiting = self.for_waiting(undivided, (bits, bits), length, held)
            left = 8 * (undivided - waiting - beside)
            if left >= least * sum(sizes):
                found = max(found, min(left / sum(sizes), bits) if tokens else bits)
        least = max(least, MOST_BITS[-1])
        if found < least:
            bits = min((each for each in MOST_BITS if each >= least), default=least)
            blocks = BLOCKS if self.left is None else min(BLOCKS, self.to_come)
            waiting = max(blocks * self.waiting_block((bits, bits), length), held)
            needed = beside + least * sum(sizes) / 8
            self._refuse(max(needed + waiting, needed / (1 - WAITING)), sinks, length)
        return found

    def first_bits(self, coded: int, sinks: int, length: int) -> float:
        """Return the mean bits of a prompt of which some tokens are coded, so that those to come have room as well."""
        length, come = max(length, self.limit.until or 0), self.to_come * self.block
        wait = self.block * self.may_wait(self.undivided(sinks), (MOST_BITS[0], MOST_BITS[0]), length)
        segments = [class_sizes(coded)] if coded else []
        if come >= wait:
            segments += [class_sizes(wait // 2)] * math.ceil((come - wait // 2) / (wait // 2))
        return self.mean_bits(segments, sinks, length)

    def _refuse(self, undivided: float, sinks: int, length: int) -> NoReturn:
        smallest = math.ceil(self.limit.whole(undivided + self._dense(sinks), self.sequences)) + 1  # for rounding
        rows = "" if self.sequences == 1 else f" in each of {self.sequences} rows"
        dense = sinks + self.recent + self.block
        known = " (those that max_new_tokens= or max_length= allow are among them)" * (self.left is not None)
        raise CacheError(
            f"max_bytes={self.limit.nbytes} is too few for {length} tokens{rows}{known}: up to "
            f"{dense} of them are dense (sinks, recent_window={self.recent} and tail_block={self.block}), and with the "
            f"means and widths of codes that takes {smallest}; write max_bytes={smallest} or more. Nothing was changed"
        )


def ready_within(waits: int, block: int, most: int) -> int:
    """Return how many of the waiting tokens are coded now, the oldest ones: whole blocks, none while few wait.

    Examples
    --------
    >>> [ready_within(waits, 64, 256) for waits in (192, 256, 320)], ready_within(1024, 64, 4096)
    ([0, 128, 192], 512)
    """
    most = min(most, SETTLED)
    if waits < most:
        return 0
    return max((waits - min(most // 2, NEWEST)) // block, 1) * block
