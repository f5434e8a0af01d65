"""Code heads of keys or values: coordinates, weighted squares, widths that a head's bits allow, codes.

Long ones on the CPU by one compiled loop (`grace_opt.kernels.heads`), others step by step, with the same result up to
rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.coding import weighted_squares
from ...kernels.heads import Heads, Tables, is_compiled
from ...kernels.steps import lower_hulls, within_budget
from .bitplanes import PER_BYTE
from .codebooks import WIDTHS, codebooks, distortions
from .codes import LARGE, LOWEST_POWER, PARAMETER_BITS, SMALL, Codes, Part, codes_from, encode

#: Largest number of coordinates that are made at once, if one head has fewer: every step takes copies of them, and a
#: prompt must not take much more memory while it is coded than while it is read.
MAX_NUMBERS = 2**16


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
        ``(H,)`` float64, to be divided among the channels of all classes.
    """

    tensor: Tensor
    order: Tensor
    encode: Tensor | None
    weights: Tensor
    energy: Tensor
    sizes: Sequence[int]
    bits: Tensor

    def divided(self) -> Iterator[Part]:
        """Yield the coordinates of some heads at a time, and the levels that their bits are divided into."""
        groups = head_groups(self.tensor)
        if self.tensor.device.type == "cpu":
            for heads in groups:
                coordinates = self._coordinates(heads)
                largest, losses = self._losses(coordinates, heads)
                yield Part(coordinates, _divided(losses, self.sizes, self.bits[heads]), largest)
                del coordinates  # before the next ones are made
            return
        # Elsewhere each step has to be started, which takes longer than to make the coordinates twice: the bits of all
        # heads are divided at once.
        found = [self._losses(self._coordinates(heads), heads) for heads in groups]
        largest, losses = (torch.cat(each) for each in zip(*found, strict=True))
        levels = _divided(losses, self.sizes, self.bits)
        for heads in groups:
            yield Part(self._coordinates(heads), levels[:, heads], largest[heads])

    def _coordinates(self, heads: slice) -> Tensor:
        return _coordinates(self.tensor, self.order, self.encode, heads)

    def _losses(self, coordinates: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        largest, squares = weighted_squares(coordinates.mT, self.weights[heads], self.sizes)
        return largest, _losses(squares, self.energy[heads])


def code_heads(stored: Sequence[StoredHeads]) -> list[Codes]:
    """Code keys and values: long ones on the CPU by one compiled loop, others step by step."""
    if not is_compiled(*(each.tensor for each in stored)):
        return [encode(each.divided(), each.sizes) for each in stored]
    from ...kernels.heads.host import code_heads as compiled

    kinds = []
    for each in stored:
        heads, _, width = each.tensor.shape
        matrices = each.encode
        if matrices is None:
            matrices = torch.eye(width, dtype=torch.float32, device=each.tensor.device).expand(heads, -1, -1)
        kinds.append(Heads(each.tensor, each.order, matrices, each.weights, each.energy, each.bits))
    sizes = stored[0].sizes
    found = compiled(kinds, _tables(tuple(sizes)), codebooks(stored[0].tensor.device))
    return [codes_from(coded, sizes) for coded in found]


@functools.lru_cache(maxsize=32)
def _tables(sizes: tuple[int, ...]) -> Tables:
    """Return the tables that the compiled loop reads."""
    here = torch.device("cpu")
    return Tables(
        counts=torch.tensor(sizes, device=here),
        costs=_costs(sizes, here),
        widths=torch.tensor(WIDTHS, dtype=torch.uint8, device=here),
        distortions=torch.tensor(distortions(), dtype=torch.float64, device=here),
        small=SMALL,
        large=LARGE,
        lowest=LOWEST_POWER,
    )


def head_groups(tensor: Tensor) -> list[slice]:
    """Return the heads that are worked on together: all of a short prompt, one by one of a long one."""
    step = max(MAX_NUMBERS // tensor[0].numel(), 1)
    return [slice(first, first + step) for first in range(0, len(tensor), step)]


def _coordinates(tensor: Tensor, order: Tensor, encode: Tensor | None, heads: slice) -> Tensor:
    """Return the coordinates of some heads, in the order of the classes; made anew when needed, as they are large.

    The tokens of a channel are adjacent in memory: what follows works along them.
    """
    # One by one: that copies whole tokens, and not single numbers.
    copies = [own.index_select(0, tokens) for own, tokens in zip(tensor[heads], order[heads], strict=True)]
    part = (torch.stack(copies) if len(copies) > 1 else copies[0][None]).float()
    return (part.mT.contiguous() if encode is None else encode[heads].mT @ part.mT).mT


def _divided(losses: Tensor, sizes: Sequence[int], bits: Tensor) -> Tensor:
    """Return the levels that `grace_opt.allocate` chooses within each head's bits ``(H,)``: ``(C, H, d)``.

    By its steps alone: its checks, its bound and its certificate take three times as long, and nobody would read them.
    """
    heads, classes, width, count = losses.shape
    costs = _costs(tuple(sizes), losses.device)[:, None].expand(heads, classes, width, count).flatten(1, 2)
    problem = losses.flatten(1, 2), costs, torch.ones_like(costs, dtype=torch.bool)
    levels, _ = within_budget(*problem, bits, lower_hulls(*problem))
    return levels.view(heads, classes, width).transpose(0, 1)


def _losses(squares: Tensor, energy: Tensor) -> Tensor:
    """Return the loss of every width, ``(H, C, d, 8)`` float64, from weighted sums of squares ``(H, C, d)``."""
    loss = squares * energy.to(squares.device)[:, None]
    return loss[..., None] * torch.tensor(distortions(), dtype=torch.float64, device=loss.device)


@functools.lru_cache(maxsize=32)
def _costs(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the bits that every width takes in every class, ``(C, 8)`` float64."""
    widths = torch.tensor(WIDTHS, dtype=torch.float64, device=device)
    rounded = torch.tensor([-(-size // PER_BYTE) * PER_BYTE for size in sizes], dtype=torch.float64, device=device)
    return widths * rounded[:, None] + (widths > 0) * PARAMETER_BITS
