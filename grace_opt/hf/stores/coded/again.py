"""Code segments again with fewer bits: all classes of all segments of a head share its bits, at one price.

What is coded again are the decoded numbers. A channel that keeps its width keeps its codes as they are, so it has no
further error; of one that loses bits, the errors of both codes add up. Small segments are made one first, once, as each
has means, widths and scales of its own.

How much a token counts is known of its class: the mean weight of its tokens, by the attention that they had received
when they got their class. So tokens that few queries ask for lose bits first, wherever they are.

Source: Lagrangian allocation (Shoham & Gersho, IEEE Trans. ASSP 36, 1988), as in `allocate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...._util.arrays import to_device
from ....kernels.cache.coding import scaled_and_coded
from ...bases.classes import class_sizes
from ...bases.codebooks import WIDTHS, codebooks, distortions
from ...models.placement import rank
from ..plan import LayerPlan
from .codes import Codes, Part, codes_of_widths, encode
from .heads import divided_levels
from .segment import Segment, class_of_tokens, class_weights, packed_classes, segment_bits

#: Segments of fewer tokens are made one with their neighbours, once they have twice as many together.
SMALL = 256


def coded_again(
    plan: LayerPlan, segments: Sequence[Segment], energies: tuple[Tensor, Tensor], bits: tuple[float, float]
) -> tuple[Segment, ...]:
    """Code segments of one sequence again, so that all of them together have so many bits.

    Parameters
    ----------
    plan : LayerPlan
    segments : sequence of Segment
    energies : (Tensor, Tensor)
        ``(H, d)`` each: what a unit of squared error in each coordinate costs.
    bits : (float, float)
        Mean bits per element of keys and of values, with everything counted.
    """
    budget = plan.bits
    assert budget is not None
    segments = _together(segments)
    tokens, heads = sum(each.coded for each in segments), len(segments[0].keys.means)
    widths = [each.shape[-1] for each in energies]
    fixed = [sum(segment_bits(each.coded, len(each.keys.counts), width) for each in segments) for width in widths]
    means = [max(mean - own / (tokens * width), 0.0) for mean, own, width in zip(bits, fixed, widths, strict=True)]
    shares = budget.head_bits(plan.index, heads, rank(), (means[0], means[1]))
    found = []
    for kind, (energy, share, width) in enumerate(zip(energies, shares, widths, strict=True)):
        every = [(each.keys, each.values)[kind] for each in segments]
        weights = [each.weight(kind) for each in segments]
        found.append(_fewer(every, energy.double(), weights, share * tokens * width))
    return tuple(
        replace(segment, keys=keys, values=values) for segment, keys, values in zip(segments, *found, strict=True)
    )


def _together(segments: Sequence[Segment]) -> list[Segment]:
    """Return segments in which runs of small ones are one, if it is no small one itself."""
    found: list[Segment] = []
    run: list[Segment] = []
    for each in segments:
        if each.tokens >= SMALL or each.hidden:
            found, run = [*found, *run], []
            found.append(each)
            continue
        run.append(each)
        if sum(own.tokens for own in run) >= 2 * SMALL:
            found, run = [*found, _merged(run)], []
    return [*found, *run]


def _merged(segments: Sequence[Segment]) -> Segment:
    """Return one segment in place of several, in as many bits as there are; tokens are classed by their weights."""
    numbers = [torch.cat(parts, 1) for parts in zip(*(each.coordinates() for each in segments), strict=True)]
    weights = [
        torch.cat([each.weight(kind).gather(1, each.token_classes()) for each in segments], 1) for kind in (0, 1)
    ]
    sizes = class_sizes(numbers[0].shape[1])
    classes = class_of_tokens(weights[0], sizes)
    order = classes.argsort(dim=-1, stable=True)
    made = []
    for coordinates in numbers:
        ordered = coordinates.gather(1, order[..., None].expand(-1, -1, coordinates.shape[-1]))
        shape = len(sizes), len(ordered), ordered.shape[-1]
        levels = torch.full(shape, len(WIDTHS) - 1, dtype=torch.int64, device="cpu")
        part = Part(ordered.mT.contiguous().mT, levels, ordered.abs().amax((1, 2)))
        made.append(encode([part], sizes, segments[0].keys.trellis))
    of_classes = class_weights([each.gather(1, order) for each in weights], sizes)
    return Segment(made[0], made[1], packed_classes(classes), of_classes)


def _fewer(every: Sequence[Codes], energy: Tensor, weights: Sequence[Tensor], bits: Tensor) -> list[Codes]:
    """Return codes that all together have so many bits, ``(H,)``; no channel gets more than it has."""
    numbers = [codes.decode().mT for codes in every]
    costs, most = [], []
    lost = torch.tensor(distortions(every[0].trellis), dtype=torch.float64, device=energy.device)
    for codes, coordinates, weight in zip(every, numbers, weights, strict=True):
        centred = coordinates - (codes.means.float() * codes.unit[:, None])[..., None]
        squares = torch.stack(
            [part.double().square().sum(-1) for part in torch.split(centred, list(codes.counts), -1)], 1
        )
        levels = codes.indices().long().transpose(0, 1)
        # Decoded numbers vary less than what they stand for, by about what was lost.
        squares = squares / (1 - lost[levels]).clamp(min=lost[-1])
        costs.append(squares * weight.double()[..., None] * energy[:, None])
        most.append(levels)
    sizes = [count for codes in every for count in codes.counts]
    # On the CPU, as sizes of what is stored depend on what is found.
    before, place = torch.cat(most, 1).cpu(), torch.arange(len(WIDTHS), device="cpu")
    found = divided_levels(torch.cat(costs, 1).cpu(), sizes, bits, every[0].trellis, place <= before[..., None])
    parts = torch.split(found, [len(codes.counts) for codes in every])
    return [_recoded(*each) for each in zip(every, numbers, parts, strict=True)]


def _recoded(codes: Codes, coordinates: Tensor, levels: Tensor) -> Codes:
    """Return codes with such levels ``(C, H, d)``, on the CPU; `coordinates` ``(H, d, T)`` are what they stand for."""
    widths = torch.tensor(WIDTHS, dtype=torch.uint8, device="cpu")
    own = codes.widths()
    before, after = own.flatten(1).cpu(), widths[levels].flatten(1)
    changed = before != after
    if not changed.any():
        return codes
    rows = (coordinates / codes.unit[:, None, None]).flatten(0, 1)
    made_widths = torch.where(changed, after, torch.zeros_like(after))
    scales, planes = scaled_and_coded(
        rows, codes.means.flatten().float(), made_widths, codes.counts, codebooks(rows.device, codes.trellis)
    )
    kept = codes.class_scales(own).flatten(1).to(scales.dtype)
    scales = torch.where(to_device(changed, scales.device), scales, kept)
    together = tuple(
        _planes(old, new, *each)
        for old, new, *each in zip(codes.planes, planes, before, made_widths, after, strict=True)
    )
    return codes_of_widths(codes, levels, scales, together)


def _planes(old: Tensor, new: Tensor, before: Tensor, made: Tensor, after: Tensor) -> Tensor:
    """Return the planes of all channels of a class: of those that were made, and of those that stay."""
    first_old, first_new = (each.long().cumsum(0) - each for each in (before, made))
    first = torch.where(made > 0, len(old) + first_new, first_old)
    times = after.long()
    inside = torch.arange(int(times.sum()), device="cpu") - torch.repeat_interleave(times.cumsum(0) - times, times)
    place = torch.repeat_interleave(first, times) + inside
    return torch.cat([old, new])[to_device(place, old.device)]
