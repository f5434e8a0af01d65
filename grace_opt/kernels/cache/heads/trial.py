"""Check that heads coded by the compiled loop equal those coded step by step, up to rounding, on a small case."""

from __future__ import annotations

import torch

from ..._shared.cases import draw
from ...steps.reference import lower_hulls, within_budget
from ..coding.reference import Codebooks, scaled_and_coded, weighted_squares
from .parts import Heads, Tables

COUNTS = (24, 77)
WIDTHS = (0, 1, 2, 3, 4, 8)


def cpu() -> bool:
    """Compare levels and codes of two heads; their scale tells whether coordinates and means are right."""
    from . import host

    device, (classes, count) = torch.device("cpu"), (len(COUNTS), sum(COUNTS))
    levels = torch.zeros(9, 256, dtype=torch.float32, device=device)
    edges = torch.full((9, 255), torch.inf, dtype=torch.float32, device=device)
    for width in WIDTHS[1:]:
        levels[width, : 2**width] = torch.linspace(-2, 2, 2**width, dtype=torch.float32, device=device)
        edges[width, : 2**width - 1] = (levels[width, 1 : 2**width] + levels[width, : 2**width - 1]) / 2
    books = Codebooks(levels, edges, 8)
    costs = torch.tensor(
        [[width * (-(-n // 8) * 8) + 16 * (width > 0) for width in WIDTHS] for n in COUNTS],
        dtype=torch.int64,
        device=device,
    )
    errors = torch.tensor([4.0**-width for width in WIDTHS], dtype=torch.float64, device=device)
    tables = Tables(
        torch.tensor(COUNTS, dtype=torch.int64, device=device),
        costs.double(),
        torch.tensor(WIDTHS, dtype=torch.uint8, device=device),
        errors,
        0,
        1e4,
        -9,
    )
    tensor, encode = draw(device, 2, count, 6), draw(device, 2, 6, 6)
    order = torch.stack([torch.arange(count, device=device).roll(turn).flip(0) for turn in (3, 50)])
    inputs = tensor, order, encode, draw(device, 2, count).abs(), draw(device, 2, 6).double().square() + 0.1
    bits = torch.tensor([1500.0, 3100.0], dtype=torch.float64, device=device)
    (actual,) = host.code_heads([Heads(*inputs, bits)], tables, books)
    rows = (tensor.gather(1, order[..., None].expand_as(tensor)) @ encode).mT
    squares = weighted_squares(rows, inputs[3], COUNTS)[1]
    losses = (squares * inputs[4][:, None]).flatten(1)[..., None] * errors
    prices = costs.double()[:, None].expand(classes, 6, -1).flatten(0, 1).expand_as(losses)
    problem = losses, prices, torch.ones_like(losses, dtype=torch.bool)
    best = within_budget(*problem, bits, *lower_hulls(*problem))[0].view(2, classes, 6).transpose(0, 1)
    widths = tables.widths[best].flatten(1)
    means = actual.means.flatten().float()
    scales, planes = scaled_and_coded(rows.flatten(0, 1), means, widths, COUNTS, books)
    near = torch.allclose(actual.scales.flatten(1).float(), scales.float(), rtol=2e-3, atol=0)
    # A code whose number lies on an edge, up to rounding, may be either one.
    other = [float((one ^ two).count_nonzero()) for one, two in zip(actual.planes, planes, strict=True)]
    moved = (actual.means.float() - rows.mean(2)).abs().max()
    return torch.equal(actual.levels, best) and near and sum(other) <= 2 and bool(moved < 2e-3)
