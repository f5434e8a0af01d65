"""`Codes`: keys or values of one sequence, in classes of tokens, with bits per channel of each class.

What is stored: one mean per channel, in 16 bits; for each class, the widths of the channels in 3 bits, a scale in 16
bits for channels that have any, and one bit plane per bit (:mod:`grace_opt.hf.bits.bitplanes`). Tokens are in the order
of their classes; attention does not mind, and :mod:`grace_opt.hf.bits.row` knows which token is where. Newer tokens are
appended in blocks, each of which corrects the means and scales of a few channels (:mod:`grace_opt.hf.bits.drift`).

Source: Lloyd–Max quantisation with the scale fitted by least squares; classes and widths are chosen by `allocate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.coding import codes_of, scaled_and_coded
from ...kernels.heads import Coded
from .bitplanes import append_codes, pack_bits, unpack_bits, unpack_codes
from .codebooks import WIDTHS, codebook, codebooks
from .drift import Drift, factor_of, most_gained, stored_means, tried_factors

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
    drift : Drift or None
        What blocks of newer tokens have corrected; None if there are no such blocks, or they correct nothing.
    """

    levels: Tensor
    means: Tensor
    scales: Tensor
    unit: Tensor
    planes: tuple[Tensor, ...]
    counts: tuple[int, ...]
    drift: Drift | None = None

    def __post_init__(self) -> None:
        codebook(self.means.device)  # made now, as torch.compile cannot trace how

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that is stored, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        named |= {f"planes{number}": plane for number, plane in enumerate(self.planes)}
        return named if self.drift is None else named | {f"drift_{name}": t for name, t in vars(self.drift).items()}

    def widths(self) -> Tensor:
        """Return the bits of every channel, ``(C, H, d)`` uint8."""
        return _as_tensor(WIDTHS, self.levels.device)[self._indices().long()]

    def _indices(self) -> Tensor:
        """Return the index into `WIDTHS` of every channel, ``(C, H, d)`` uint8."""
        (heads, width), classes = self.means.shape, len(self.counts)
        places = unpack_bits(self.levels, heads * classes * width)
        return (places[0] | places[1] << 1 | places[2] << 2).view(classes, heads, width)

    def decode(self, blocks: Sequence[Tensor] = ()) -> Tensor:
        """Return the coordinates, ``(H, Σ counts, d)`` float32, in the order of the classes.

        Parameters
        ----------
        blocks : sequence of Tensor
            For each class, the number of the block that each of its newer tokens came with, counted from 1; they
            follow the prompt's tokens. Read if there is a drift.
        """
        heads, width = self.means.shape
        widths = self.widths()
        table, means = codebook(self.means.device), self.means.float() * self.unit[:, None]
        scales = self._scales(widths) * self.unit[:, None]
        found = []
        if self.drift is not None:
            moved, factors = self.drift.tables(self.means, len(self.counts))
            moved, factors = (moved * self.unit[:, None]).permute(1, 2, 0), factor_of(factors).permute(1, 2, 3, 0)
        for number, count in enumerate(self.counts):
            flat = widths[number].reshape(-1)
            codes = unpack_codes(self.planes[number], flat, count)
            numbers = table.view(-1)[codes.int() + (flat.int() * table.shape[1])[:, None]]
            numbers = numbers.view(heads, width, -1) * scales[number, :, :, None]
            if self.drift is None:
                found.append(numbers + means[..., None])
                continue
            of_prompt, newer = torch.split(numbers, [count - len(blocks[number]), len(blocks[number])], -1)
            newer = torch.addcmul(moved[..., blocks[number]], newer, factors[number][..., blocks[number]])
            found += [of_prompt + means[..., None], newer]
        return torch.cat([means.new_zeros(heads, width, 0), *found], dim=-1).mT

    def _scales(self, widths: Tensor) -> Tensor:
        """Return the scales of all channels, ``(C, H, d)`` float32; 0 for those without bits."""
        wide = widths > 0
        place = wide.flatten().cumsum(0).view(widths.shape)  # without shapes that depend on data, for torch.compile
        return torch.nn.functional.pad(self.scales.float(), (1, 0))[torch.where(wide, place, 0)]

    def appended(self, coordinates: Tensor, counts: Sequence[int], energy: Tensor, corrected: int) -> Codes:
        """Append a block of tokens by the present widths, and correct the means and scales of a few channels.

        Parameters
        ----------
        coordinates : Tensor
            ``(H, Σ counts, d)``, in the order of their classes.
        counts : sequence of int
            Number of tokens in each class.
        energy : Tensor
            ``(H, d)``: what a unit of squared error in each coordinate costs.
        corrected : int
            How many means, and scales, of a head this block corrects: as many as those before.
        """
        classes, (heads, width) = len(counts), self.means.shape
        widths = self.widths()
        drift = self.drift or Drift.none(heads, width, classes, corrected, self.means.device)
        table, books = codebook(self.means.device), codebooks(self.means.device)
        fitted, moved = self._scales(widths), coordinates.float() / self.unit[:, None, None]
        means, factors = (held[-1] for held in drift.tables(self.means, classes))

        def coded(number: int, part: Tensor, mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
            """Return a class's codes with factors ``(F, H, d)``, and their squared errors ``(F, H, d)``."""
            flat = widths[number].expand(factor.shape).reshape(-1)
            scale = (fitted[number] * factor_of(factor)).reshape(-1)
            spread = (part - mean[:, None]).mT.expand(len(factor), -1, -1, -1).flatten(0, 2)
            codes = codes_of(spread, flat, scale, books)
            numbers = table.view(-1)[codes.int() + (flat.int() * table.shape[1])[:, None]]
            return codes, (spread - numbers * scale[:, None]).square().sum(1).view(factor.shape)

        parts = torch.split(moved, list(counts), 1)

        def errors(mean: Tensor, factor: Tensor) -> Tensor:
            """Return squared errors ``(F, C, H, d)`` with a mean ``(H, d)`` and codes of factors ``(F, C, H, d)``."""
            return torch.stack([coded(n, part, mean, factor[:, n])[1] for n, part in enumerate(parts)], 1)

        if corrected:
            energy, tried = energy.to(moved.device), tried_factors(factors)
            mean, before = stored_means(moved.mean(1)), errors(means, tried)
            # A new mean is judged with the best scales, as they are chosen for it; those of classes all change alike.
            gain = (before.sum(1).amin(0) - errors(mean, tried).sum(1).amin(0)) * energy
            at = most_gained(gain, means, mean, corrected)
            means = means.scatter(1, *at)
            found = errors(means, tried)
            best = found.min(0)
            held = tried.eq(factors).int().argmax(0)[None]
            gain = (found.gather(0, held)[0] - best.values) * energy
            chosen = tried.gather(0, best.indices[None])[0]
            gain, before, after = (each.transpose(0, 1).reshape(heads, -1) for each in (gain, factors, chosen))
            drift = drift.with_block(at, most_gained(gain, before, after, corrected))
            means, factors = (held[-1] for held in drift.tables(self.means, classes))
        planes = []
        for number, part in enumerate(parts):
            codes = coded(number, part, means, factors[number][None])[0]
            planes.append(append_codes(self.planes[number], self.counts[number], codes, widths[number].reshape(-1)))
        together = tuple(old + new for old, new in zip(self.counts, counts, strict=True))
        return replace(self, planes=tuple(planes), counts=together, drift=drift if corrected else None)

    def map(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Apply a function to every tensor."""
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        return Codes.of(changed, self.counts)

    @classmethod
    def of(cls, tensors: dict[str, Tensor], counts: Sequence[int]) -> Codes:
        """Put together what `tensors` took apart."""
        planes = tuple(tensors[f"planes{number}"] for number in range(len(counts)))
        plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(("planes", "drift_"))}
        moved = {name.removeprefix("drift_"): t for name, t in tensors.items() if name.startswith("drift_")}
        return cls(**plain, planes=planes, counts=tuple(counts), drift=Drift(**moved) if moved else None)


class Part(NamedTuple):
    """Some heads that are coded together.

    Attributes
    ----------
    coordinates : Tensor
        ``(h, Σ counts, d)``, in the order of the classes. Fastest if the tokens of a channel are adjacent.
    levels : Tensor
        ``(C, h, d)`` int64, indices into `WIDTHS`.
    largest : Tensor
        ``(h,)``: the largest absolute value of each head.
    """

    coordinates: Tensor
    levels: Tensor
    largest: Tensor


def encode(parts: Iterable[Part], counts: Sequence[int]) -> Codes:
    """Code coordinates by given widths.

    Parameters
    ----------
    parts : iterable of Part
        All heads, in order; one part after the other is taken and forgotten.
    counts : sequence of int
        Number of tokens of each class; at least one token in all.
    """
    levels, means, scales, units, planes = [], [], [], [], []
    for part in parts:
        scaled, unit = part.coordinates.float(), _unit(part.largest.float())
        if bool((unit != 1).any()):
            scaled = scaled / unit[:, None, None]
        means.append(scaled.mean(1).to(torch.float16))
        rows, centres = scaled.mT.flatten(0, 1), means[-1].flatten().float()
        widths = _as_tensor(WIDTHS, rows.device)[part.levels].flatten(1)
        found = scaled_and_coded(rows, centres, widths, counts, codebooks(rows.device))
        levels.append(part.levels)
        units.append(unit)
        scales.append(found[0])
        planes.append(found[1])
        del part, scaled, rows  # before the next part is made
    every = torch.cat(levels, dim=1)
    coded = Coded(
        levels=every,
        means=torch.cat(means),
        scales=torch.cat(scales, dim=1).view(every.shape),
        unit=torch.cat(units),
        planes=tuple(torch.cat(of_class) for of_class in zip(*planes, strict=True)),
    )
    return codes_from(coded, counts)


def codes_from(coded: Coded, counts: Sequence[int]) -> Codes:
    """Return what is stored of codes that were just made; `counts` as for `encode`."""
    return Codes(
        levels=_packed(coded.levels),
        means=coded.means,
        scales=coded.scales[coded.levels > 0],
        unit=coded.unit,
        planes=coded.planes,
        counts=tuple(counts),
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
