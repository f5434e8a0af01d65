"""`Codes`: keys or values of one sequence, in classes of tokens, with bits per channel of each class.

What is stored: one mean per channel, in 16 bits; for each class, the widths of the channels in 3 bits, a scale in 16
bits for channels that have any, and one bit plane per bit (:mod:`grace_opt.hf.stores.coded.bitplanes`). Tokens are in
the order of their classes; attention does not mind, and :mod:`grace_opt.hf.stores.coded.segment` knows which token is
where.

Source: Lloyd–Max quantisation, with scales for the least sum of errors to the fourth
(`grace_opt.kernels.cache.coding`); classes and widths are chosen by `allocate`. Codes of a trellis depend on each
other, and are read as one bit more (:mod:`grace_opt.kernels.cache.coding.trellis`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...._util.arrays import to_device
from ....kernels.cache.coding import scaled_and_coded
from ....kernels.cache.coding.trellis import as_read
from ....kernels.cache.heads import Coded
from ...bases.codebooks import EVEN_WIDTH, WIDTHS, codebook, codebooks, trellis_codebook
from .bitplanes import pack_bits, unpack_bits, unpack_classes

#: Bits of an index into `WIDTHS`.
LEVEL_BITS = 3
#: Bits of a mean, and of a scale.
PARAMETER_BITS = 16
#: Above, sums of means and codes could leave float16.
LARGE = float(torch.finfo(torch.float16).max) / 4
#: Below, float16 would leave too few digits of channels that are smaller than the largest.
SMALL = 2.0**-4
#: A head of zeros gets the unit with this exponent: its inverse is a number as well.
LOWEST_POWER = -100


@dataclass(frozen=True)
class Codes:
    """Coded coordinates of ``H`` heads with ``d`` channels, in ``C`` classes of tokens.

    Attributes
    ----------
    levels : Tensor
        ``(3, ⌈H C d/8⌉)`` uint8: bits of each channel's index into `WIDTHS`.
    means : Tensor
        ``(H, d)`` float16, in units of `unit`: what channels without bits stand for.
    scales : Tensor
        ``(N,)`` float16, in units of `unit`: for the N channels that have bits, class by class, head by head.
    unit : Tensor
        ``(H,)`` float32, powers of two: 1 unless a head's numbers are too large or too small for float16.
    planes : tuple of Tensor
        The codes of each class, ``(Σ widths, ⌈n_c/8⌉)`` uint8.
    counts : tuple of int
        Number of tokens of each class.
    trellis : bool
        Whether the codes are those of a trellis (:mod:`grace_opt.kernels.cache.coding.trellis`).
    """

    levels: Tensor
    means: Tensor
    scales: Tensor
    unit: Tensor
    planes: tuple[Tensor, ...]
    counts: tuple[int, ...]
    trellis: bool = False

    def __post_init__(self) -> None:
        codebook(self.means.device)  # made now, as torch.compile cannot trace how

    @property
    def book(self) -> Tensor:
        """The numbers that codes stand for, as they are read: `codebook`, or `trellis_codebook`."""
        return (trellis_codebook if self.trellis else codebook)(self.means.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that is stored, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return named | {f"planes{number}": plane for number, plane in enumerate(self.planes)}

    def widths(self) -> Tensor:
        """Return the bits of every channel, ``(C, H, d)`` uint8."""
        levels = self.indices()
        return _as_tensor(WIDTHS, self.levels.device).index_select(0, levels.view(-1).int()).view(levels.shape)

    def indices(self) -> Tensor:
        """Return the index into `WIDTHS` of every channel, ``(C, H, d)`` uint8."""
        (heads, width), classes = self.means.shape, len(self.counts)
        places = unpack_bits(self.levels, heads * classes * width)
        return (places[0] | places[1] << 1 | places[2] << 2).view(classes, heads, width)

    def decode(self) -> Tensor:
        """Return the coordinates, ``(H, Σ counts, d)`` float32, in the order of the classes.

        Steps without a compiled loop come here for every row and segment, so what all classes share is done once.
        """
        heads, width = self.means.shape
        widths = self.widths()
        book = self.book
        means = (self.means.float() * self.unit[:, None])[..., None]
        scales = (self.class_scales(widths) * self.unit[:, None])[..., None]
        wide = widths.view(len(self.counts), -1, 1).int()
        longer = (wide > 0) & (wide < EVEN_WIDTH)
        if self.trellis:
            wide = wide + longer
        table, first = book.view(-1), wide * book.shape[1]
        found = []
        for number, codes in enumerate(unpack_classes(self.planes, widths.view(len(self.counts), -1), self.counts)):
            if self.trellis:
                codes = torch.where(longer[number], as_read(codes), codes)
            numbers = table.index_select(0, (codes + first[number]).view(-1))
            found.append(numbers.view(heads, width, -1) * scales[number] + means)
        return (found[0] if len(found) == 1 else torch.cat(found, dim=-1)).mT

    def class_scales(self, widths: Tensor) -> Tensor:
        """Return the scales of all channels, ``(C, H, d)`` float32, in units of `unit`; 0 for those without bits."""
        wide = widths > 0
        place = wide.flatten().cumsum(0).view(widths.shape)  # without shapes that depend on data, for torch.compile
        return torch.nn.functional.pad(self.scales.float(), (1, 0))[torch.where(wide, place, 0)]

    def map(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Apply a function to every tensor."""
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        return Codes.of(changed, self.counts, self.trellis)

    def split(self, heads: int) -> tuple[Codes, Codes]:
        """Return the codes of the first heads and those of the others, copied; of codes in one class."""
        levels, widths = self.indices(), self.widths()[0]
        first = widths[:heads].long()
        scales, planes = torch.stack([(first > 0).sum(), first.sum()]).tolist()  # one wait
        parts = []
        for own, scaled, wide in (
            (slice(heads), slice(scales), slice(planes)),
            (slice(heads, None), slice(scales, None), slice(planes, None)),
        ):
            parts.append(
                Codes(
                    levels=_packed(levels[:, own]),
                    means=self.means[own].clone(),
                    scales=self.scales[scaled].clone(),
                    unit=self.unit[own].clone(),
                    planes=(self.planes[0][wide].clone(),),
                    counts=self.counts,
                    trellis=self.trellis,
                )
            )
        return parts[0], parts[1]

    @classmethod
    def of(cls, tensors: dict[str, Tensor], counts: Sequence[int], trellis: bool = False) -> Codes:
        """Put together what `tensors` took apart."""
        planes = tuple(tensors[f"planes{number}"] for number in range(len(counts)))
        plain = {name: tensor for name, tensor in tensors.items() if not name.startswith("planes")}
        return cls(**plain, planes=planes, counts=tuple(counts), trellis=trellis)


def codes_of_widths(codes: Codes, levels: Tensor, scales: Tensor, planes: tuple[Tensor, ...]) -> Codes:
    """Return codes with the same means, and other levels ``(C, H, d)``, scales ``(C, H d)`` and planes."""
    used = torch.nonzero(levels.flatten())[:, 0]
    return replace(
        codes,
        levels=to_device(_packed(levels), codes.means.device),
        scales=scales.flatten().index_select(0, to_device(used, codes.means.device)),
        planes=planes,
    )


def stacked(first: Codes, second: Codes) -> Codes:
    """Return codes of the heads of both; both have the same number of tokens, in one class."""
    levels = torch.cat([codes.indices() for codes in (first, second)], dim=1)
    return Codes(
        levels=_packed(levels),
        means=torch.cat([first.means, second.means]),
        scales=torch.cat([first.scales, second.scales]),
        unit=torch.cat([first.unit, second.unit]),
        planes=(torch.cat([first.planes[0], second.planes[0]]),),
        counts=first.counts,
        trellis=first.trellis,
    )


class Part(NamedTuple):
    """Some heads that are coded together.

    Attributes
    ----------
    coordinates : Tensor
        ``(h, Σ counts, d)``, in the order of the classes. Fastest if the tokens of a channel are adjacent.
    levels : Tensor
        ``(C, h, d)`` int64, indices into `WIDTHS`; on the CPU, as sizes of what is stored depend on them.
    largest : Tensor
        ``(h,)``: the largest absolute value of each head.
    """

    coordinates: Tensor
    levels: Tensor
    largest: Tensor


def encode(parts: Iterable[Part], counts: Sequence[int], trellis: bool = False) -> Codes:
    """Code coordinates by given widths.

    Parameters
    ----------
    parts : iterable of Part
        All heads, in order; one part after the other is taken and forgotten.
    counts : sequence of int
        Number of tokens of each class; at least one token in all.
    trellis : bool
        Whether to code by a trellis.
    """
    return codes_from(_coded(parts, counts, trellis), counts, trellis)


def encode_apart(
    parts: Iterable[Part], counts: Sequence[int], heads: Sequence[int], trellis: bool = False
) -> list[Codes]:
    """Return what `encode` does, for some heads after the other: so many of each."""
    coded = _coded(parts, counts, trellis)
    if len(heads) == 1:
        return [codes_from(coded, counts, trellis)]
    levels = torch.split(coded.levels, list(heads), 1)
    widths = _as_tensor(WIDTHS, coded.levels.device)
    numbers = torch.stack([widths[own].sum((1, 2)) for own in levels], dim=1).tolist()
    apart = (
        levels,
        torch.split(coded.means, list(heads)),
        torch.split(coded.scales, list(heads), 1),
        torch.split(coded.head_scale, list(heads)),
        zip(*(torch.split(of_class, own) for of_class, own in zip(coded.planes, numbers, strict=True)), strict=True),
    )
    # Copies: each lives as long as its sequence does.
    return [
        codes_from(
            Coded(own, means.clone(), scales, unit.clone(), tuple(each.clone() for each in planes)), counts, trellis
        )
        for own, means, scales, unit, planes in zip(*apart, strict=True)
    ]


def _coded(parts: Iterable[Part], counts: Sequence[int], trellis: bool) -> Coded:
    levels, means, scales, units, planes = [], [], [], [], []
    for coordinates, own, largest in parts:
        scaled, unit = coordinates.float(), _unit(largest.float())
        del coordinates  # or they would be held beside what they become
        if scaled.device.type != "cpu" or bool((unit != 1).any()):  # by one rather than wait for the device
            scaled = scaled / unit[:, None, None]
        means.append(scaled.mean(1).to(torch.float16))
        rows, centres = scaled.mT.flatten(0, 1), means[-1].flatten().float()
        widths = _as_tensor(WIDTHS, own.device)[own].flatten(1)
        found = scaled_and_coded(rows, centres, widths, counts, codebooks(rows.device, trellis))
        levels.append(own)
        units.append(unit)
        scales.append(found[0])
        planes.append(found[1])
        del scaled, rows  # before the next part is made
    every = torch.cat(levels, dim=1)
    return Coded(
        levels=every,
        means=torch.cat(means),
        scales=torch.cat(scales, dim=1).view(every.shape),
        head_scale=torch.cat(units),
        planes=tuple(torch.cat(of_class) for of_class in zip(*planes, strict=True)),
    )


def codes_from(coded: Coded, counts: Sequence[int], trellis: bool = False) -> Codes:
    """Return what is stored of codes that were just made; other parameters as for `encode`."""
    device, used = coded.means.device, torch.nonzero(coded.levels.flatten())[:, 0]
    return Codes(
        levels=to_device(_packed(coded.levels), device),
        means=coded.means,
        scales=coded.scales.flatten().index_select(0, to_device(used, device)),
        unit=coded.head_scale,
        planes=coded.planes,
        counts=tuple(counts),
        trellis=trellis,
    )


def _packed(levels: Tensor) -> Tensor:
    """Return the bits of indices into `WIDTHS`, packed."""
    bits = levels.reshape(-1)
    return pack_bits(torch.stack([bits & 1, bits >> 1 & 1, bits >> 2 & 1]))


def fixed_bits(heads: int, classes: int, width: int) -> int:
    """Return the bits that `Codes` takes whatever the widths are: means, levels, units."""
    return heads * width * (PARAMETER_BITS + classes * LEVEL_BITS) + heads * 32 + LEVEL_BITS * 8


def _unit(largest: Tensor) -> Tensor:
    """Return one power of two per head: 1, or what brings numbers that are too large or too small into float16."""
    beyond = torch.ceil(torch.log2(largest / LARGE)).clamp(min=LOWEST_POWER)
    return torch.exp2(torch.where((beyond > 0) | (largest < SMALL), beyond, 0))


def _as_tensor(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.uint8, device=device)
