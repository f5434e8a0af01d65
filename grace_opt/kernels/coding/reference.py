"""Scales, codes and bit planes in torch operations, for any device: the definition of the compiled loops.

Source: damped iteratively reweighted least squares, for scales with a small sum of errors to the fourth (Burrus,
Barreto and Selesnick, IEEE Trans. Signal Processing 42, 1994).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._util.arrays import to_device

#: Columns in a byte of a plane.
PER_BYTE = 8
#: Number of steps to a better scale, and how much of each is taken: whole ones go too far.
FITTING_STEPS, PART = 3, 0.5
#: Each more bit halves the rounding of most columns, and how far one may be beyond the largest level to cost as much.
BEYOND = 1.3
LARGEST = float(torch.finfo(torch.float16).max)


class Codebooks(NamedTuple):
    """The numbers that codes of 0, 1, 2, … bits stand for, before the scale; row b has those of b bits.

    Attributes
    ----------
    levels : Tensor (M, 256), float32
        Ascending, then zeros; all but those of `even` bits are symmetric.
    edges : Tensor (M, 255), float32
        Between neighbouring levels, then infinity.
    even : int
        The number of bits whose levels are evenly spaced up to the largest entry; other scales are fitted.
    """

    levels: Tensor
    edges: Tensor
    even: int


def scaled_and_coded(
    rows: Tensor, means: Tensor, widths: Tensor, counts: Sequence[int], books: Codebooks
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `grace_opt.kernels.coding.scaled_and_coded`."""
    scales, planes, there = [], [], to_device(widths.long(), rows.device)
    for part, own, wide in zip(torch.split(rows, list(counts), 1), widths, there, strict=True):
        centred = part - means[:, None]
        scales.append(fitted(centred, wide, books))
        planes.append(pack_codes(codes_of(centred, wide, scales[-1].float(), books), own))
    return torch.stack(scales), tuple(planes)


def weighted_squares(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """See `grace_opt.kernels.coding.weighted_squares`."""
    largest = rows.abs().amax((1, 2))
    centred = rows / positive(largest)[:, None, None]
    squares = (centred - centred.mean(2, keepdim=True)).square_()
    classes = zip(torch.split(squares, list(counts), 2), torch.split(weights, list(counts), 1), strict=True)
    return largest, torch.stack([(part @ share[..., None])[..., 0] for part, share in classes], dim=1).double()


def fitted(centred: Tensor, widths: Tensor, books: Codebooks) -> Tensor:
    """Return the scale of every row ``(R, n)``, float16; 0 where there are no bits.

    In operations on all rows, each with the edges of its own width: on a GPU every operation has to be started.
    """
    count = centred.shape[1]
    if not count:
        return torch.zeros(len(centred), dtype=torch.float16, device=centred.device)
    sizes, widths = centred.abs(), widths.long()
    numbers, largest = 1 << widths, sizes.amax(1)
    edges, levels = _upper(widths, books)
    reach = books.levels[widths, numbers - 1].double() + BEYOND * count ** (1 / 3) / numbers
    scale = torch.maximum(centred.double().square().mean(1).sqrt().float(), (largest.double() / reach).float())
    for _ in range(FITTING_STEPS):
        scale = _better_scale(sizes, scale, edges, levels)
    scale = torch.where(widths == books.even, largest, scale)
    return torch.where(widths > 0, scale, 0).clamp(max=LARGEST).to(torch.float16)


def _better_scale(sizes: Tensor, scale: Tensor, edges: Tensor, levels: Tensor) -> Tensor:
    """Return scales with a smaller sum of errors to the fourth, of absolute values ``(R, n)`` and positive levels.

    A step of least squares in which every column counts by its squared error, so most of all what is far beyond the
    largest level: one key that is cut short can change a whole row of attention.
    """
    codes = torch.searchsorted(edges * positive(scale)[:, None], sizes)
    numbers = levels.gather(1, codes).double()
    errors = sizes - scale.double()[:, None] * numbers
    weights = errors.square()
    step = (weights * errors * numbers).sum(1) / (weights * numbers.square()).sum(1)
    better = (scale + PART * step).float()
    return torch.where(better > 0, better, scale)


def codes_of(centred: Tensor, widths: Tensor, scale: Tensor, books: Codebooks) -> Tensor:
    """Return the code of the nearest level for all of ``(R, n)``, uint8; 0 where there are no bits."""
    scaled = centred / positive(scale)[:, None]
    return torch.searchsorted(books.edges[widths.long()], scaled, out_int32=True).to(torch.uint8)


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
    packed: Tensor = (by_byte << places(bits.device)).sum(-1, dtype=torch.uint8)
    return packed


def pack_codes(codes: Tensor, widths: Tensor) -> Tensor:
    """Pack codes ``(R, n)`` uint8 of widths ``(R,)``, on the CPU, into planes ``(Σ widths, ⌈n/8⌉)`` uint8."""
    owner, place = (to_device(each, codes.device) for each in owners(widths, int(widths.sum())))
    return pack_bits((codes[owner] >> place[:, None]) & 1)


def owners(widths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the row and the bit of each of `count` planes."""
    wide = widths.long()
    owner = torch.repeat_interleave(torch.arange(len(wide), device=wide.device), wide, output_size=count)
    first = wide.cumsum(0) - wide
    return owner, (torch.arange(len(owner), device=wide.device) - first[owner]).to(torch.uint8)


def places(device: torch.device) -> Tensor:
    """Return the numbers of the bits of a byte."""
    return torch.arange(PER_BYTE, dtype=torch.uint8, device=device)


def _upper(widths: Tensor, books: Codebooks) -> tuple[Tensor, Tensor]:
    """Return the edges ``(R, N - 1)`` and levels ``(R, N)`` above zero of every row: N as many as any width but `even`
    has, whose rows get the first ones, and a scale that is not read."""
    most = 2 ** (max(bits for bits in range(len(books.levels)) if bits != books.even) - 1)
    place = (1 << widths)[:, None] // 2 + torch.arange(most, device=widths.device)
    return books.edges[widths[:, None], place[:, :-1]], books.levels[widths[:, None], place]


def positive(scale: Tensor) -> Tensor:
    """Return the scale, or one where it is zero: whatever is divided by it is zero as well."""
    return torch.where(scale > 0, scale, 1)
