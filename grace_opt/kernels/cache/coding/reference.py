"""Scales, codes and bit planes in torch operations, for any device: the definition of the compiled loops.

Source: damped iteratively reweighted least squares, for scales with a small sum of errors to the fourth (Burrus,
Barreto and Selesnick, IEEE Trans. Signal Processing 42, 1994).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...._util.arrays import to_device
from .trellis import searched

#: Columns in a byte of a plane.
PER_BYTE = 8
#: Number of steps to a better scale, and how much of each is taken: whole ones go too far.
FITTING_STEPS, PART = 3, 0.5
#: Each more bit halves the rounding of most columns, and how far one may be beyond the largest level to cost as much.
BEYOND = 1.3
LARGEST, SMALLEST = float(torch.finfo(torch.float16).max), float(torch.finfo(torch.float32).tiny)


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
    trellis : Tensor (M, 256), float32, or None
        With it, all codes but those of `even` bits are those of a trellis: row b has the levels of codes that are read
        as b bits, one more than they take (:mod:`grace_opt.kernels.cache.coding.trellis`). Scales are fitted to
        `levels`.
    """

    levels: Tensor
    edges: Tensor
    even: int
    trellis: Tensor | None = None


def levels_read(books: Codebooks) -> Tensor:
    """Return the levels of a trellis; none without one."""
    return books.levels[:0] if books.trellis is None else books.trellis


def scaled_and_coded(
    rows: Tensor,
    means: Tensor,
    widths: Tensor,
    counts: Sequence[int],
    books: Codebooks,
    search: Callable[[Tensor, Tensor, Tensor], Tensor] = searched,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `kernels.cache.coding.scaled_and_coded`; `search` is `kernels.cache.coding.trellis.searched`, or
    another one that returns the same.

    In operations on all rows of a class, each with the edges of its own width: on a GPU every operation has to be
    started.
    """
    there = to_device(widths.long(), rows.device)
    edges, (above, levels, top) = books.edges[there], _upper(there, books)
    trellis_coded = None if books.trellis is None else _trellis_coded(there, books.even, books.trellis)
    scales, codes = [], []
    for number, centred in enumerate(torch.split(rows - means[:, None], list(counts), 1)):
        upper = above[number], levels[number], top[number]
        scales.append(_fitted(centred, there[number], upper, books.even))
        scaled = centred / positive(scales[-1].float())[:, None]
        codes.append(torch.searchsorted(edges[number], scaled, out_int32=True).to(torch.uint8))
        if trellis_coded is not None:
            own, levels_of_codes, bits = trellis_coded[number]
            codes[-1] = torch.where(own[:, None], search(scaled, levels_of_codes, bits), codes[-1])
    return torch.stack(scales), tuple(pack_classes(codes, widths))


def _trellis_coded(widths: Tensor, even: int, trellis: Tensor) -> list[tuple[Tensor, ...]]:
    """Return, for every class, which rows have codes of a trellis, their levels as they are read, and their bits."""
    own = (widths > 0) & (widths != even)
    bits = torch.where(own, widths, 1)
    return list(zip(own.unbind(), trellis[bits + 1].unbind(), bits.unbind(), strict=True))


def weighted_squares(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """See `grace_opt.kernels.cache.coding.weighted_squares`."""
    largest = rows.abs().amax((1, 2))
    centred = rows / positive(largest)[:, None, None]
    squares = (centred - centred.mean(2, keepdim=True)).square_()
    classes = zip(torch.split(squares, list(counts), 2), torch.split(weights, list(counts), 1), strict=True)
    return largest, torch.stack([(part @ share[..., None])[..., 0] for part, share in classes], dim=1).double()


def _fitted(centred: Tensor, widths: Tensor, upper: tuple[Tensor, Tensor, Tensor], even: int) -> Tensor:
    """Return the scale of every row ``(R, n)``, float16; 0 where there are no bits. `upper` is of these rows."""
    (edges, levels, top), count = upper, centred.shape[1]
    if not count:
        return torch.zeros(len(centred), dtype=torch.float16, device=centred.device)
    sizes = centred.abs()
    largest, reach = sizes.amax(1), top + BEYOND * count ** (1 / 3) / (1 << widths).float()
    scale = torch.maximum(centred.double().square().mean(1).sqrt().float(), (largest.double() / reach).float())
    for _ in range(FITTING_STEPS):
        scale = _better_scale(sizes, scale, edges, levels)
    scale = torch.where(widths == even, largest, scale)
    return torch.where(widths > 0, scale, 0).clamp(max=LARGEST).to(torch.float16)


def _better_scale(sizes: Tensor, scale: Tensor, edges: Tensor, levels: Tensor) -> Tensor:
    """Return scales with a smaller sum of errors to the fourth, of absolute values ``(R, n)`` and positive levels.

    A step of least squares in which every column counts by its squared error, so most of all what is far beyond the
    largest level: one key that is cut short can change a whole row of attention.
    """
    # Not zero, as edges may be infinite.
    numbers = levels.gather(1, torch.searchsorted(edges * scale.clamp(min=SMALLEST)[:, None], sizes))
    errors = sizes - scale.double()[:, None] * numbers
    products = errors.square().mul_(numbers)
    step = errors.mul_(products).sum(1) / numbers.mul_(products).sum(1)
    better = torch.add(scale, step, alpha=PART).float()
    return torch.where(better > 0, better, scale)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack ``(..., n)`` of zeros and ones into ``(..., ⌈n/8⌉)`` bytes, the first entry lowest.

    Examples
    --------
    >>> pack_bits(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1, 1])).tolist()
    [1, 3]
    """
    spare, whole = -bits.shape[-1] % PER_BYTE, bits.to(torch.uint8)
    if spare:
        whole = torch.nn.functional.pad(whole, (0, spare))
    by_byte = whole.view(*bits.shape[:-1], whole.shape[-1] // PER_BYTE, PER_BYTE)
    packed: Tensor = (by_byte << places(bits.device)).sum(-1, dtype=torch.uint8)
    return packed


def pack_codes(codes: Tensor, widths: Tensor) -> Tensor:
    """Pack codes ``(R, n)`` uint8 of widths ``(R,)``, on the CPU, into planes ``(Σ widths, ⌈n/8⌉)`` uint8."""
    return pack_classes((codes,), widths[None])[0]


def pack_classes(codes: Sequence[Tensor], widths: Tensor) -> list[Tensor]:
    """Return what `pack_codes` does for the codes of each class, and a row of widths ``(C, R)``."""
    sizes, device = widths.sum(1).tolist(), codes[0].device
    owner, place = owners(widths.flatten(), sum(sizes))
    own_row = to_device(owner % widths.shape[1], device)
    of_class = torch.split(own_row, sizes), torch.split(to_device(place[:, None], device), sizes)
    return [pack_bits((part[own] >> bit) & 1) for part, own, bit in zip(codes, *of_class, strict=True)]


def owners(widths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the row and the bit of each of `count` planes."""
    wide = widths.long()
    owner = torch.repeat_interleave(torch.arange(len(wide), device=wide.device), wide, output_size=count)
    first = wide.cumsum(0) - wide
    return owner, (torch.arange(len(owner), device=wide.device) - first[owner]).to(torch.uint8)


def places(device: torch.device) -> Tensor:
    """Return the numbers of the bits of a byte."""
    return torch.arange(PER_BYTE, dtype=torch.uint8, device=device)


def _upper(widths: Tensor, books: Codebooks) -> tuple[Tensor, Tensor, Tensor]:
    """Return the edges ``(..., N - 1)`` and levels ``(..., N)`` above zero of rows of some widths ``(...)``, and their
    largest levels ``(...)``, float64.

    N is the most that any width but `even` has, whose rows get too few: their scale is not fitted.
    """
    most = 2 ** (max(bits for bits in range(len(books.levels)) if bits != books.even) - 1)
    place, wide = (1 << widths)[..., None] // 2 + torch.arange(most, device=widths.device), widths[..., None]
    levels = books.levels.double()
    return books.edges[wide, place[..., :-1]], levels[wide, place], levels[widths, (1 << widths) - 1]


def positive(scale: Tensor) -> Tensor:
    """Return the scale, or one where it is zero: whatever is divided by it is zero as well."""
    return torch.where(scale > 0, scale, 1)
