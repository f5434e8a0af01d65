"""Bit planes: codes of different widths without a gap between them, eight tokens to a byte.

Channel j with w bits has w planes, and plane p holds bit p of every token's code. Channels follow each other, so any
mix of widths takes exactly the sum of the widths times the number of tokens, rounded up to whole bytes per plane.

Source: bit-sliced storage, as in BitWeaving (Li & Patel, SIGMOD 2013).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.cache.coding import pack_bits as pack_bits
from ....kernels.cache.coding import pack_codes as pack_codes
from ....kernels.cache.coding.reference import PER_BYTE as PER_BYTE
from ....kernels.cache.coding.reference import owners, places


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of ``(..., ⌈n/8⌉)`` bytes, ``(..., count)`` uint8: the inverse of `pack_bits`."""
    return ((packed[..., None] >> places(packed.device)) & 1).flatten(-2)[..., :count]


def unpack_codes(planes: Tensor, widths: Tensor, count: int) -> Tensor:
    """Return the codes ``(R, count)`` uint8 of planes: the inverse of `pack_codes`."""
    return unpack_classes((planes,), widths[None], (count,))[0]


def unpack_classes(planes: Sequence[Tensor], widths: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return what `unpack_codes` does for each class: planes, a row of widths ``(C, R)``, and a number of tokens."""
    sizes, (_, rows) = [len(each) for each in planes], widths.shape
    owner, place = owners(widths.flatten(), sum(sizes))
    found = []
    of_class = torch.split(owner % rows, sizes), torch.split(place[:, None], sizes)
    for part, own, bit, count in zip(planes, *of_class, counts, strict=True):
        codes = torch.zeros(rows, count, dtype=torch.uint8, device=part.device)
        found.append(codes.index_add_(0, own, unpack_bits(part, count) << bit))
    return found


def append_bits(packed: Tensor, count: int, bits: Tensor) -> Tensor:
    """Append bits ``(..., m)`` to the `count` that are packed, filling the last byte first."""
    rest = count % PER_BYTE
    if not rest:
        return torch.cat([packed, pack_bits(bits)], dim=-1)
    last = unpack_bits(packed[..., -1:], rest)
    return torch.cat([packed[..., :-1], pack_bits(torch.cat([last, bits.to(torch.uint8)], dim=-1))], dim=-1)
