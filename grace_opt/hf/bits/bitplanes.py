"""Bit planes: codes of different widths without a gap between them, eight tokens to a byte.

Channel j with w bits has w planes, and plane p holds bit p of every token's code. Channels follow each other, so any
mix of widths takes exactly the sum of the widths times the number of tokens, rounded up to whole bytes per plane.

Source: bit-sliced storage, as in BitWeaving (Li & Patel, SIGMOD 2013).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Tokens in a byte of a plane.
PER_BYTE = 8


def pack_bits(bits: Tensor) -> Tensor:
    """Pack ``(..., n)`` of zeros and ones into ``(..., ⌈n/8⌉)`` bytes, the first entry lowest.

    Examples
    --------
    >>> pack_bits(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1, 1])).tolist()
    [1, 3]
    """
    spare = -bits.shape[-1] % PER_BYTE
    whole = torch.nn.functional.pad(bits.to(torch.uint8), (0, spare))
    by_byte = whole.view(*bits.shape[:-1], whole.shape[-1] // PER_BYTE, PER_BYTE)
    packed: Tensor = (by_byte << _places(bits.device)).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of ``(..., ⌈n/8⌉)`` bytes, ``(..., count)`` uint8: the inverse of `pack_bits`."""
    return ((packed[..., None] >> _places(packed.device)) & 1).flatten(-2)[..., :count]


def pack_codes(codes: Tensor, widths: Tensor) -> Tensor:
    """Pack codes ``(R, n)`` uint8 of widths ``(R,)`` into planes ``(Σ widths, ⌈n/8⌉)`` uint8."""
    owner, place = _planes(widths, int(widths.sum()))
    return pack_bits((codes[owner] >> place[:, None]) & 1)


def unpack_codes(planes: Tensor, widths: Tensor, count: int) -> Tensor:
    """Return the codes ``(R, count)`` uint8 of planes: the inverse of `pack_codes`."""
    owner, place = _planes(widths, len(planes))
    codes = torch.zeros(len(widths), count, dtype=torch.uint8, device=planes.device)
    return codes.index_add_(0, owner, unpack_bits(planes, count) << place[:, None])


def append_bits(packed: Tensor, count: int, bits: Tensor) -> Tensor:
    """Append bits ``(..., m)`` to the `count` that are packed, filling the last byte first."""
    rest = count % PER_BYTE
    if not rest:
        return torch.cat([packed, pack_bits(bits)], dim=-1)
    last = unpack_bits(packed[..., -1:], rest)
    return torch.cat([packed[..., :-1], pack_bits(torch.cat([last, bits.to(torch.uint8)], dim=-1))], dim=-1)


def append_codes(planes: Tensor, count: int, codes: Tensor, widths: Tensor) -> Tensor:
    """Append the codes ``(R, m)`` of later tokens to the `count` that the planes hold."""
    owner, place = _planes(widths, len(planes))
    return append_bits(planes, count, (codes[owner] >> place[:, None]) & 1)


def _planes(widths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the channel and the bit of each of `count` planes."""
    wide = widths.long()
    owner = torch.repeat_interleave(torch.arange(len(wide), device=wide.device), wide, output_size=count)
    first = wide.cumsum(0) - wide
    return owner, (torch.arange(len(owner), device=wide.device) - first[owner]).to(torch.uint8)


def _places(device: torch.device) -> Tensor:
    return torch.arange(PER_BYTE, dtype=torch.uint8, device=device)
