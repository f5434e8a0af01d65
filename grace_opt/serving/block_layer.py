"""One layer of a block: its tokens in two classes, a few of them dense, and all of it as bytes of a known size.

No query is at hand. Classes and weights come from the attention that the keys let one expect
(`grace_opt.hf.bases.expected`), what errors cost from the calibration, means and scales from the block itself. The
tokens that stay dense are those that would cost most: where a text begins, some keys are a hundred times as large as
all others, and would take the scales of their class with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..hf.bases.basis import Basis
from ..hf.bases.classes import class_sizes, token_weights
from ..hf.bases.expected import expected
from ..hf.stores.coded.bitplanes import PER_BYTE, pack_bits, unpack_bits
from ..hf.stores.coded.codes import LEVEL_BITS, PARAMETER_BITS, Codes
from ..hf.stores.coded.heads import StoredHeads, code_heads

#: Tokens of a layer that stay dense, and classes of the others.
DENSE, CLASSES = 2, 2
#: Bytes of a dense token's place, and of a head's unit.
PLACE_BYTES, UNIT_BYTES = 2, 4


@dataclass(frozen=True)
class BlockLayer:
    """How one layer of a block is coded.

    Attributes
    ----------
    keys, values : Basis
    direction : Tensor
        ``(H, 2 d, 2)``, of expected attention.
    bits : (Tensor, Tensor)
        ``(H,)`` float64 each: the bits that all numbers of each head's keys, and of its values, take together.
    tokens : int
    dtype : torch.dtype
        Of keys and values.
    """

    keys: Basis
    values: Basis
    direction: Tensor
    bits: tuple[Tensor, Tensor]
    tokens: int
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens in each class."""
        return class_sizes(self.tokens - DENSE, CLASSES)

    @property
    def nbytes(self) -> int:
        """Bytes of the layer, whatever its numbers are."""
        return sum(fixed_bytes(self.keys, self.values, self.tokens, self.dtype)) + sum(room(each) for each in self.bits)

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return keys ``(H, n, d)`` and values ``(H, n, d_v)`` as bytes, ``(nbytes,)`` uint8."""
        wide = keys.float(), values.float()
        received = expected(wide[0], self.direction)
        dense = self._dense(wide[0], received[0])
        rest = torch.ones(self.tokens, dtype=torch.bool, device=keys.device)
        rest[dense] = False
        first, second = (each[:, rest] for each in received)
        ranks = first.argsort(dim=-1, descending=True, stable=True)
        members = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, ranks[:, : self.sizes[0]], True)
        order = _in_classes(members)
        weights = (each.gather(1, order) for each in token_weights(first, second))
        stored = [
            StoredHeads(tensor[:, rest], order, basis.encode, weight, basis.energy, self.sizes, bits, trellis=True)
            for tensor, basis, weight, bits in zip(wide, (self.keys, self.values), weights, self.bits, strict=True)
        ]
        parts = [dense.to(torch.int16), keys[:, dense], values[:, dense], pack_bits(members)]
        for codes, bits in zip(code_heads(stored), self.bits, strict=True):
            parts += [codes.unit, codes.means, codes.levels]
            spent = [codes.scales, *codes.planes]
            free = room(bits) - sum(each.nbytes for each in spent)
            parts += [*spent, torch.zeros(free, dtype=torch.uint8, device=keys.device)]
        return torch.cat([each.contiguous().flatten().view(torch.uint8) for each in parts])

    def decode(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that `encode` made bytes of, ``(H, n, d)`` and ``(H, n, d_v)`` of `dtype`."""
        heads, width = self.keys.energy.shape
        depth, left = self.values.energy.shape[1], self.tokens - DENSE
        take = _Taking(data)
        dense = take(torch.int16, DENSE).long()
        whole = [take(self.dtype, heads, DENSE, each) for each in (width, depth)]
        members = unpack_bits(take(torch.uint8, heads, -(-left // PER_BYTE)), left)
        place = _in_classes(members.bool())
        rest = torch.ones(self.tokens, dtype=torch.bool, device=data.device)
        rest[dense] = False
        found = []
        for basis, exact, bits in zip((self.keys, self.values), whole, self.bits, strict=True):
            tensor = exact.new_empty(heads, self.tokens, exact.shape[-1])
            tensor[:, dense] = exact
            coded = self._codes(take, exact.shape[-1], room(bits)).decode() @ basis.decode
            into = place[..., None].expand_as(coded)
            most = torch.finfo(self.dtype).max  # what is rounded may leave float16
            tensor[:, rest] = torch.empty_like(coded).scatter_(1, into, coded).clamp(-most, most).to(self.dtype)
            found.append(tensor)
        return found[0], found[1]

    def _dense(self, keys: Tensor, received: Tensor) -> Tensor:
        """Return the tokens that stay dense, ascending: without any bits, errors in their keys would cost most."""
        off = keys - keys.median(dim=1, keepdim=True).values
        cost = ((off @ self.keys.encode).square() * self.keys.energy[:, None].float()).sum(-1) * received
        return (cost / received.sum(-1, keepdim=True)).mean(0).topk(DENSE).indices.sort().values

    def _codes(self, take: _Taking, width: int, room: int) -> Codes:
        """Return the codes of keys or values that come next."""
        heads, sizes = len(self.keys.energy), self.sizes
        unit, means = take(torch.float32, heads), take(torch.float16, heads, width)
        levels = take(torch.uint8, LEVEL_BITS, -(-heads * CLASSES * width // PER_BYTE))
        bare = Codes(levels, means, means.new_empty(0), unit, (), sizes, True)
        widths = bare.widths().flatten(1)
        inner = _Taking(take(torch.uint8, room))
        scales = inner(torch.float16, int((widths > 0).sum()))
        planes = [
            inner(torch.uint8, int(rows), -(-size // PER_BYTE))
            for rows, size in zip(widths.int().sum(1).tolist(), sizes, strict=True)
        ]
        return Codes(levels, means, scales, unit, tuple(planes), sizes, True)


class _Taking:
    """Reads one tensor after the other from bytes."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.at = data, 0

    def __call__(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return the next tensor; a copy, as its bytes may lie anywhere."""
        size = math.prod(shape) * dtype.itemsize
        part = self.data[self.at : self.at + size]
        self.at += size
        return part.clone().view(dtype).view(shape)


def _in_classes(members: Tensor) -> Tensor:
    """Return the tokens ``(H, n)`` of the first class, then the others, both in the order of the text."""
    return members.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)


def room(bits: Tensor) -> int:
    """Return the bytes for scales and codes of heads with so many bits each."""
    return math.floor(float(bits.sum()) / 8)


def fixed_bytes(keys: Basis, values: Basis, tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that keys, and values, take besides scales and codes; the classes are counted with the keys."""
    heads = len(keys.energy)
    found = []
    for basis in (keys, values):
        width = basis.energy.shape[1]
        levels = LEVEL_BITS * -(-heads * CLASSES * width // PER_BYTE)
        parameters = heads * (UNIT_BYTES + width * PARAMETER_BITS // 8)
        found.append(levels + parameters + DENSE * heads * width * dtype.itemsize)
    return found[0] + DENSE * PLACE_BYTES + heads * -(-(tokens - DENSE) // PER_BYTE), found[1]
