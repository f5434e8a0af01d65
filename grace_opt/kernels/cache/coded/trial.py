"""Check that attention over coded tokens agrees with float64 attention over the same numbers, on a small case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._shared.cases import draw
from ..coding.reference import pack_bits
from ..coding.trellis import as_read
from .forms import BLOCK, WIDTHS
from .host import coded_attention
from .table import CodedSequence, table_of, units_of
from .turned import turned_products

COUNTS = (5, 43, 77)


def cpu() -> bool:
    """Compare the compiled loops, to 1e-5."""
    agrees = (_agrees(coded_attention, torch.device("cpu"), torch.float32, 1e-5, trellis) for trellis in (False, True))
    return all(agrees) and _turns()


def _turns() -> bool:
    """Compare products with a mean that turns by two pairs of channels, at 70 positions."""
    here = torch.device("cpu")
    queries, means = draw(here, 1, 2, 3, 5).float(), draw(here, 1, 2, 2, 2).float()
    channels, angles = (
        torch.tensor([[0, 3], [1, 2]], dtype=torch.int64, device=here),
        torch.tensor([1.0, 0.01], dtype=torch.float32, device=here),
    )
    far, near = (step * torch.arange(count, device=here)[:, None] * angles for step, count in ((BLOCK, 2), (1, BLOCK)))
    begins, places = torch.stack([far.cos(), far.sin()], 1), torch.cat([near.cos(), near.sin()], 1).mT
    found = turned_products(queries, means, channels, begins, places, 70)
    turns = torch.polar(
        torch.ones(70, 2, dtype=torch.float32, device=here), torch.arange(70, device=here)[:, None] * angles
    )
    pairs = torch.complex(means[:, :, 0], means[:, :, 1])[:, :, None] * turns
    asked = torch.complex(queries[..., channels[0]], -queries[..., channels[1]])
    expected = (asked @ pairs.mT).real
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


def gpu(device: torch.device) -> bool:
    """Compare Triton's kernels, to 1e-5 in float32 and 5e-3 in float16, where factors are rounded."""
    from . import gpu as on_chip

    cases = ((torch.float32, 1e-5, False), (torch.float32, 1e-5, True), (torch.float16, 5e-3, True))
    return all(_agrees(on_chip.coded_attention, device, *case) for case in cases)


def _agrees(
    attend: Callable[..., tuple[Tensor, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
    trellis: bool,
) -> bool:
    """Compare output and attention received of two heads, with every width."""
    books = torch.zeros(9, 256, dtype=torch.float32, device=device)
    for width in range(2, 9) if trellis else WIDTHS[1:]:  # as codes are read
        levels = torch.linspace(-2, 2, 2**width, dtype=torch.float32, device=device)
        books[width, : 2**width] = levels if width == 8 else levels * levels.abs().sqrt()
    query, bases = draw(device, 1, 4, 2, 20), draw(device, 2, 2, 20, 20)
    sinks, tails = draw(device, 2, 2, 3, 20), draw(device, 2, 1, 2, 9, 20)
    query, sinks, tails = query.to(dtype), sinks.to(dtype), tails.to(dtype)
    (keys, dense_keys), (values, dense_values) = (codes(device, books, seed, trellis=trellis) for seed in (0, 1))
    table, count = table_of([units_of(keys, values, 2)], 2), sum(COUNTS)
    # A trellis' codes also leave something out, which is added by position.
    positions = (torch.arange(2 * count, device=device) * 7 % 150).view(2, count).to(torch.int16)
    added = draw(device, 1, 2, 4, 150).float() if trellis else None
    sequence = CodedSequence(table, sinks[0], sinks[1], bases[0], bases[1], positions)
    output, received = attend(query, [sequence], tails[0], tails[1], books, 9, [0], trellis=trellis, added=added)
    every = [
        torch.cat([tensor.double(), dense @ basis.double(), tail[0].double()], dim=1)
        for tensor, dense, basis, tail in zip(sinks, (dense_keys, dense_values), bases, tails, strict=True)
    ]
    logits = query.double().view(2, 4, 20) @ every[0].mT
    if added is not None:
        where = positions.long()[:, None].expand(-1, 4, -1)
        logits[..., 3 : 3 + count] += added[0].double().gather(-1, where)
    logits *= 20**-0.5
    last = torch.arange(2, device=device).repeat(2) + every[0].shape[1] - 2
    logits.masked_fill_(torch.arange(every[0].shape[1], device=device) > last[:, None], -torch.inf)
    weights = logits.softmax(-1)
    expected = (weights @ every[1]).view(1, 4, 2, 20).transpose(1, 2)
    newest = weights[..., -9:].view(2, 2, 2, 9)
    sums = torch.stack([tensor.sum(2).mean(1) for tensor in (newest, newest.square())], dim=1)
    near = [
        (output - expected).abs().max() <= tolerance * expected.abs().max(),
        (received[0, :, :2] - sums).abs().max() <= tolerance,
    ]
    return all(bool(each) for each in near)


@dataclass(frozen=True)
class StoredCodes:
    """What `units_of` reads of codes; see `grace_opt.kernels.cache.coded.table.StoredCodes`."""

    levels: Tensor
    means: Tensor
    scales: Tensor
    unit: Tensor
    planes: tuple[Tensor, ...]
    counts: tuple[int, ...]
    wide: Tensor

    def widths(self) -> Tensor:
        """Return the bits of every channel."""
        return self.wide


def codes(
    device: torch.device,
    books: Tensor,
    seed: int,
    change: Callable[[Tensor, Tensor], Tensor] = lambda code, width: code,
    trellis: bool = False,
) -> tuple[StoredCodes, Tensor]:
    """Return codes, and what they stand for, or these changed ones, ``(2, all tokens, 20)`` float64.

    With `trellis`, they are those of a trellis, and `books` has what they are read as.
    """
    shape = len(COUNTS), 2, 20
    choice = (torch.arange(120, device=device) * 7 + seed).remainder(len(WIDTHS)).view(shape)
    wide = torch.tensor(WIDTHS, dtype=torch.uint8, device=device)[choice]
    means, unit = draw(device, 2, 20).half(), torch.tensor([1.0, 0.25], dtype=torch.float32, device=device)
    scales = (draw(device, *shape).abs() + 0.1).half() * (wide > 0)
    planes, dense = [], []
    for number, count in enumerate(COUNTS):
        flat = wide[number].flatten().int()
        noise = draw(device, 40, count).abs().mul(1e4).int()
        code = noise % (1 << flat)[:, None]
        rows = [code[row] >> place & 1 for row, width in enumerate(flat.tolist()) for place in range(width)]
        planes.append(pack_bits(torch.stack(rows)))
        if trellis:
            longer = (flat > 0) & (flat < 8)
            code, flat = torch.where(longer[:, None], as_read(code), code), flat + longer
        numbers = books[flat.long()].gather(1, change(code, flat[:, None]).long()).view(2, 20, count).double()
        dense.append((numbers * scales[number, ..., None] + means[..., None].double()) * unit[:, None, None])
    bits = choice.flatten()
    levels = pack_bits(torch.stack([bits & 1, bits >> 1 & 1, bits >> 2 & 1]))
    stored = StoredCodes(levels, means, scales[wide > 0], unit, tuple(planes), COUNTS, wide)
    return stored, torch.cat(dense, dim=2).mT
