"""Check that compiled codes equal the reference's, bit for bit, on a small case with every number of bits; and that the
GPU's codes of a trellis have no larger errors."""

from __future__ import annotations

import torch

from ..._shared.cases import draw
from . import reference, trellis


def cpu() -> bool:
    """Compare variances, scales and planes of rows in two classes, of which one has no whole number of bytes."""
    from . import cpu as compiled

    device = torch.device("cpu")
    levels = torch.zeros(9, 256, dtype=torch.float32, device=device)
    edges = torch.full((9, 255), torch.inf, dtype=torch.float32, device=device)
    for bits in range(1, 9):
        levels[bits, : 2**bits] = torch.linspace(-2, 2, 2**bits, dtype=torch.float32, device=device)
        edges[bits, : 2**bits - 1] = (levels[bits, 1 : 2**bits] + levels[bits, : 2**bits - 1]) / 2
    rows = draw(device, 9, 624)
    widths = torch.stack([torch.arange(9, dtype=torch.uint8, device=device).roll(turn) for turn in (0, 4)])
    same: list[tuple[torch.Tensor, torch.Tensor]] = []
    for books in (reference.Codebooks(levels, edges, 8), reference.Codebooks(levels, edges, 8, levels)):
        case = (rows, rows.mean(1), widths, (37, 587), books)
        actual, expected = compiled.scaled_and_coded(*case), reference.scaled_and_coded(*case)
        same += zip((actual[0], *actual[1]), (expected[0], *expected[1]), strict=True)
    arguments = rows[None], draw(device, 1, 624).abs(), (37, 587)
    squares = zip(compiled.weighted_squares(*arguments), reference.weighted_squares(*arguments), strict=True)
    near = all(torch.allclose(one, other, rtol=1e-5, atol=0) for one, other in squares)
    return near and all(torch.equal(one, other) for one, other in same)


def gpu(device: torch.device) -> bool:
    """Compare errors of rows of every number of bits: rounding may lead another way."""
    from .gpu import searched

    rows, bits = draw(device, 12, 40), torch.arange(12, device=device) % 6 + 1
    levels = torch.full((12, 256), torch.nan, dtype=torch.float32, device=device)
    for row, width in enumerate(bits.tolist()):
        levels[row, : 2 << width] = torch.linspace(-2, 2, 2 << width, dtype=torch.float32, device=device)
    actual, expected = (
        rows - levels.gather(1, trellis.as_read(search(rows, levels, bits)).long())
        for search in (searched, trellis.searched)
    )
    one, other = (each.double().square().sum(1) for each in (actual, expected))
    return torch.allclose(one, other, rtol=1e-5, atol=0)
