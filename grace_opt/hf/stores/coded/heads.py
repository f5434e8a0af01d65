"""Code heads of keys or values: coordinates, weighted squares, widths that a head's bits allow, codes.

Long ones on the CPU by one compiled loop (`grace_opt.kernels.cache.heads`), others step by step, with the same result
up to rounding. On another device every step has to be started, and every number that the host reads has to be waited
for. So there the large steps are done for as many heads at once as memory allows, and what is small and full of
choices, the division of bits, on the CPU: for all keys and values of a batch after one wait.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.cache.coding import weighted_squares
from ....kernels.cache.heads import Heads, Tables, is_compiled
from ....kernels.steps import lower_hulls, within_budget
from ...bases.codebooks import WIDTHS, codebooks, distortions
from .bitplanes import PER_BYTE
from .codes import LARGE, LOWEST_POWER, PARAMETER_BITS, SMALL, Codes, Part, codes_from, encode, encode_apart

#: Largest number of coordinates that are made at once, if one head has fewer: every step takes copies of them, and a
#: prompt must not take much more memory while it is coded than while it is read.
MAX_NUMBERS = 2**16
#: The same on another device. Steps take some 40 bytes per number, in all no more than a layer of a large model
#: takes to read a prompt of so many.
MAX_NUMBERS_ELSEWHERE = 2**24


@dataclass(frozen=True)
class StoredHeads:
    """Keys or values of a sequence that are about to be coded.

    Attributes
    ----------
    tensor : Tensor
        ``(H, n, d)``.
    order : Tensor
        ``(H, n)``: the tokens, class by class.
    encode : Tensor or None
        ``(H, d, d)``: coordinates are ``tensor @ encode``; None for the channels as they are.
    weights : Tensor
        ``(H, n)``, in this order: how much a squared error of each token counts.
    energy : Tensor
        ``(H, d)`` float64: how much one of each coordinate counts.
    sizes : sequence of int
        Number of tokens of each class.
    bits : Tensor
        ``(H,)`` float64, to be divided among the channels of all classes; on the CPU.
    trellis : bool
        Whether to code by a trellis; the same for all that are coded together.
    """

    tensor: Tensor
    order: Tensor
    encode: Tensor | None
    weights: Tensor
    energy: Tensor
    sizes: Sequence[int]
    bits: Tensor
    trellis: bool = False

    def divided(self) -> Iterator[Part]:
        """Yield the coordinates of some heads at a time, and the levels that their bits are divided into."""
        for heads in head_groups(self.tensor):
            coordinates = self._coordinates(heads)
            largest, squares = self._squares(coordinates, heads)
            costs = squares * self.energy[heads, None]
            yield Part(coordinates, divided_levels(costs, self.sizes, self.bits[heads], self.trellis), largest)
            del coordinates  # before the next ones are made

    def costs(self) -> tuple[Tensor, Tensor]:
        """Return the largest number of every head, and what no bits at all would cost, ``(H, C, d)`` float64."""
        found = [self._squares(self._coordinates(heads), heads) for heads in head_groups(self.tensor)]
        largest, squares = (torch.cat(each) for each in zip(*found, strict=True))
        return largest, squares * self.energy[:, None]

    def parts(self, levels: Tensor, largest: Tensor) -> Iterator[Part]:
        """Yield what `divided` does, for levels ``(C, H, d)`` that are known; the coordinates are made once more."""
        for heads in head_groups(self.tensor):
            yield Part(self._coordinates(heads), levels[:, heads], largest[heads])

    def _coordinates(self, heads: slice) -> Tensor:
        return _coordinates(self.tensor, self.order, self.encode, heads)

    def _squares(self, coordinates: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        return weighted_squares(coordinates.mT, self.weights[heads], self.sizes)


def code_heads(stored: Sequence[StoredHeads]) -> list[Codes]:
    """Code keys and values: long ones on the CPU by one compiled loop, others step by step.

    On the CPU those of one sequence, with the same classes; elsewhere those of any number of sequences, of which each
    is coded as it is alone.
    """
    if stored[0].tensor.device.type != "cpu":
        return _coded_elsewhere(stored)
    if not is_compiled(*(each.tensor for each in stored)):
        return [encode(each.divided(), each.sizes, each.trellis) for each in stored]
    from ....kernels.cache.heads.host import code_heads as compiled

    kinds = []
    for each in stored:
        heads, _, width = each.tensor.shape
        matrices = each.encode
        if matrices is None:
            matrices = torch.eye(width, dtype=torch.float32, device=each.tensor.device).expand(heads, -1, -1)
        kinds.append(Heads(each.tensor, each.order, matrices, each.weights, each.energy, each.bits))
    sizes, trellis = stored[0].sizes, stored[0].trellis
    found = compiled(kinds, _tables(tuple(sizes), trellis), codebooks(stored[0].tensor.device, trellis))
    return [codes_from(coded, sizes, trellis) for coded in found]


def _coded_elsewhere(stored: Sequence[StoredHeads]) -> list[Codes]:
    """Code keys and values that are not on the CPU: it divides the bits of all of them, after one wait."""
    groups = _alike(stored)
    every = [_together(group).costs() for group in groups]
    copied = torch.cat([costs.flatten() for _, costs in every]).cpu()
    apart = zip(torch.split(copied, [costs.numel() for _, costs in every]), every, strict=True)
    levels = _levels(groups, [here.view(there.shape) for here, (_, there) in apart])
    found = []
    for group, (largest, _), own in zip(groups, every, levels, strict=True):
        parts = _together(group).parts(own, largest)
        found += encode_apart(parts, group[0].sizes, [len(each.tensor) for each in group], group[0].trellis)
    return found


def _levels(groups: Sequence[Sequence[StoredHeads]], costs: Sequence[Tensor]) -> list[Tensor]:
    """Return what `divided_levels` does for every group: those of equal sizes in one call, which threads share."""
    found: dict[int, Tensor] = {}
    sizes = [(group[0].sizes, each.shape[1:]) for group, each in zip(groups, costs, strict=True)]
    for size in dict.fromkeys(sizes):
        numbers = [number for number, own in enumerate(sizes) if own == size]
        bits = torch.cat([each.bits for number in numbers for each in groups[number]])
        trellis = groups[numbers[0]][0].trellis
        levels = divided_levels(torch.cat([costs[number] for number in numbers]), size[0], bits, trellis)
        apart = torch.split(levels, [len(costs[number]) for number in numbers], 1)
        found |= zip(numbers, apart, strict=True)
    return [found[number] for number in range(len(groups))]


def _alike(stored: Sequence[StoredHeads]) -> list[list[StoredHeads]]:
    """Return runs of keys and values that the same operations can code: of equal sizes, and not too many at once."""
    groups: list[list[StoredHeads]] = []
    for each in stored:
        last = groups[-1] if groups else []
        if last and _kind(last[0]) == _kind(each) and (len(last) + 1) * each.tensor.numel() <= MAX_NUMBERS_ELSEWHERE:
            last.append(each)
        else:
            groups.append([each])
    return groups


def _kind(each: StoredHeads) -> tuple[object, ...]:
    return each.sizes, each.tensor.shape, each.tensor.dtype, each.encode is None


def _together(group: Sequence[StoredHeads]) -> StoredHeads:
    """Return the heads of a group as those of one; copies, so made anew when needed."""
    if len(group) == 1:
        return group[0]
    encode = [each.encode for each in group if each.encode is not None]
    return StoredHeads(
        torch.cat([each.tensor for each in group]),
        torch.cat([each.order for each in group]),
        torch.cat(encode) if encode else None,
        torch.cat([each.weights for each in group]),
        torch.cat([each.energy for each in group]),
        group[0].sizes,
        torch.cat([each.bits for each in group]),
        group[0].trellis,
    )


@functools.lru_cache(maxsize=32)
def _tables(sizes: tuple[int, ...], trellis: bool = False) -> Tables:
    """Return the tables that the compiled loop reads."""
    here = torch.device("cpu")
    return Tables(
        counts=torch.tensor(sizes, dtype=torch.int64, device=here),
        costs=_costs(sizes, here),
        widths=torch.tensor(WIDTHS, dtype=torch.uint8, device=here),
        distortions=torch.tensor(distortions(trellis), dtype=torch.float64, device=here),
        small=SMALL,
        large=LARGE,
        lowest=LOWEST_POWER,
    )


def head_groups(tensor: Tensor) -> list[slice]:
    """Return the heads that are worked on together: all of a short prompt, fewer of a long one."""
    most = MAX_NUMBERS if tensor.device.type == "cpu" else MAX_NUMBERS_ELSEWHERE
    step = max(most // tensor[0].numel(), 1)
    return [slice(first, first + step) for first in range(0, len(tensor), step)]


def _coordinates(tensor: Tensor, order: Tensor, encode: Tensor | None, heads: slice) -> Tensor:
    """Return the coordinates of some heads, in the order of the classes; made anew when needed, as they are large.

    The tokens of a channel are adjacent in memory: what follows works along them.
    """
    some, tokens = tensor[heads], order[heads]
    if tensor.device.type == "cpu":
        # One by one: that copies whole tokens, and not single numbers.
        copies = [own.index_select(0, its) for own, its in zip(some, tokens, strict=True)]
        part = (torch.stack(copies) if len(copies) > 1 else copies[0][None]).float()
    else:
        part = some[torch.arange(len(some), device=some.device)[:, None], tokens].float()
    return (part.mT.contiguous() if encode is None else encode[heads].mT @ part.mT).mT


def divided_levels(
    costs: Tensor, sizes: Sequence[int], bits: Tensor, trellis: bool = False, admissible: Tensor | None = None
) -> Tensor:
    """Return the levels that `grace_opt.allocate` chooses within each head's bits ``(H,)``: ``(C, H, d)``.

    `costs` ``(H, C, d)`` are those of no bits at all; `admissible` ``(H, C, d, 8)`` says which levels may be chosen,
    all if None.

    By its steps alone: its checks, its bound and its certificate take three times as long, and nobody would read them.
    """
    heads, classes, width = costs.shape
    losses = costs[..., None] * torch.tensor(distortions(trellis), dtype=torch.float64, device=costs.device)
    prices = _costs(tuple(sizes), losses.device)[:, None].expand(losses.shape).flatten(1, 2)
    every = torch.ones_like(prices, dtype=torch.bool) if admissible is None else admissible.flatten(1, 2)
    problem = losses.flatten(1, 2), prices, every
    levels, _ = within_budget(*problem, bits, lower_hulls(*problem))
    return levels.view(heads, classes, width).transpose(0, 1)


@functools.lru_cache(maxsize=32)
def _costs(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the bits that every width takes in every class, ``(C, 8)`` float64."""
    widths = torch.tensor(WIDTHS, dtype=torch.float64, device=device)
    rounded = torch.tensor([-(-size // PER_BYTE) * PER_BYTE for size in sizes], dtype=torch.float64, device=device)
    return widths * rounded[:, None] + (widths > 0) * PARAMETER_BITS
