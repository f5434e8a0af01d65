r"""Codes beyond scalar ones, on paper: even steps at their entropy, with the decisions of `bits=`.

What it is. Importance, classes of tokens, basis and shares of layers and heads are those of `bits=`. In place of whole
widths, every coordinate of a class is rounded to even steps, and an ideal arithmetic coder stores the numbers of the
steps, knowing that coordinate's spread in that class (16 bits). A head has one unit of loss, from which all of its
steps follow, so that a step is finer where an error costs more: :math:`s = \Delta / \sqrt{w e}` with the energy
:math:`e` of the coordinate and the mean weight :math:`w` of the class's tokens. :math:`\Delta` is found by bisection,
so that the head has its bits. Coordinates whose spread is below a third of their step are not coded. Means, spreads and
classes of tokens are counted.

What it is not. No method of this library: tokens of such a code have different lengths, so none can be read without all
before it. It says what is left to gain on disk, or for a code that can be read in place (a trellis, a lattice).

Source: entropy-coded scalar quantisation, Gish and Pierce, IEEE Trans. Inf. Theory 14 (1968); the zero step is wider
than the others, as in Sullivan, IEEE Trans. Inf. Theory 42 (1996).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from bench.arena.peers.crossings import CLASS_BITS
from bench.arena.prompt import Classes, classes_of
from bench.arena.reference import asked, shares_of, water_filled
from bench.arena.stored import PARAMETER_BITS, Layer, Method, Stored, between, in_16_bits, stored
from grace_opt.hf import CalibratedBasis
from grace_opt.hf.bases.basis import Basis

SOURCE = "entropy-coded scalar quantisation, Gish and Pierce 1968"
RATES = (3.0, 2.25, 2.0, 1.0)
#: Where the first step after zero begins, in steps.
ZERO = 0.6
#: Spreads of less than so many steps are not coded.
LEAST_SPREAD = 1 / 3
#: Bits of the longest code word.
LONGEST = 32
#: Halvings of the interval in which the logarithm of Δ is sought, and its ends beside the test channel's.
HALVINGS, ENDS = 10, (-2.0, 2.0)


class Source(NamedTuple):
    """Coordinates of a class of tokens.

    Attributes
    ----------
    numbers : Tensor
        ``(H, n, d)``, means removed.
    spread : Tensor
        ``(H, d)``: root mean squares, as 16 bits hold them.
    cost : Tensor
        ``(H, d)``: what a squared error costs.
    """

    numbers: Tensor
    spread: Tensor
    cost: Tensor


def coded(source: Source, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Round to steps; return the numbers read again, and the bits ``(H,)`` of all, spreads included.

    Parameters
    ----------
    source : Source
    unit : Tensor
        ``(H,)``: Δ.
    """
    step = unit[:, None] / source.cost.sqrt()
    used = (source.spread > 0) & (source.spread >= LEAST_SPREAD * step)
    step = torch.where(used, step, 1.0)
    spread = torch.where(used, source.spread, 1.0)
    relative = torch.where(used, step / spread, 1.0)[:, None]
    number = (source.numbers.abs() / step[:, None] + (1 - ZERO)).floor()
    number = torch.where(used[:, None], number, 0)
    # The ends of each number's step, in spreads; that of zero is one half of it, which stands for both.
    first, last = ((number - side).clamp(min=0) * relative for side in (1 - ZERO, -ZERO))
    chance = torch.special.ndtr(-first) - torch.special.ndtr(-last)
    bits = -torch.where(number > 0, chance, 2 * chance).clamp(min=2.0**-LONGEST).log2()
    density = (torch.exp(-end.square() / 2) / (2 * torch.pi) ** 0.5 for end in (first, last))
    centre = (next(density) - next(density)) / chance
    centre = torch.where(
        (centre >= first) & (centre <= last), centre, (first + last) / 2
    )  # so far out, digits are lost
    read = torch.where(number > 0, centre, 0) * torch.where(used, spread, 0)[:, None] * source.numbers.sign()
    return read, torch.where(used, bits.sum(1) + PARAMETER_BITS, 0).sum(-1)


def in_classes(tokens: Tensor, basis: Basis, mean: Tensor, classes: Classes, weights: Tensor) -> tuple[Tensor, float]:
    """Code tokens with `mean` ``(H,)`` bits per number; `weights` ``(H, n)`` are in the order of the classes."""
    heads, count, width = tokens.shape
    turned = tokens @ basis.encode
    centre = in_16_bits(turned.mean(1, keepdim=True))
    sources = []
    for part, share in zip(classes.sorted(turned - centre), classes.split(weights), strict=True):
        spread = in_16_bits(part.square().mean(1).sqrt())
        cost = basis.energy.float() * share.mean(1, keepdim=True).float()
        sources.append(Source(part, spread, cost.clamp(min=torch.finfo(torch.float32).tiny)))
    fixed = PARAMETER_BITS * (width + 1) + CLASS_BITS / 2 * count
    wanted = mean.float() * count * width - fixed
    losses = torch.stack([one.spread.square() * one.cost for one in sources], 1).flatten(1)
    shares = torch.tensor(classes.sizes, dtype=torch.float64).repeat_interleave(width) / (count * width)
    # What is left of the largest loss at that rate is about a twelfth of Δ².
    largest = losses.double().argmax(1, keepdim=True)
    left = losses.gather(1, largest) * torch.exp2(-2 * water_filled(losses, shares, mean).gather(1, largest))
    start = (12 * left[:, 0]).clamp(min=torch.finfo(torch.float32).tiny).log2().float() / 2
    low, high = start + ENDS[0], start + ENDS[1]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        over = torch.stack([coded(one, middle.exp2())[1] for one in sources]).sum(0) > wanted
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    found = [coded(one, in_16_bits(high).exp2()) for one in sources]
    spent = sum(float(bits.sum()) for _, bits in found) + heads * fixed
    return (classes.restored([read for read, _ in found]) + centre) @ basis.decode, spent


def store(layers: list[Layer], basis: CalibratedBasis | None, *, rate: float) -> list[Stored]:
    """Code a prompt; raise `CalibrationError` without a basis that has all layers."""
    basis, shares = shares_of(layers, basis, rate)
    found = []
    for layer in layers:
        classes = classes_of(layer, between(layer.keys.shape[1]))
        bases = asked(basis.keys[layer.index], layer), basis.values[layer.index]
        coders = [
            functools.partial(in_classes, basis=own, mean=mean, classes=classes, weights=weights)
            for own, mean, weights in zip(bases, shares[layer.index], classes.weights, strict=True)
        ]
        found.append(stored(layer, coders[0], coders[1]))
    return found


def methods() -> list[Method]:
    """Return every rate."""
    return [
        Method(
            f"reference-entropy-{rate:g}",
            f"`bits={rate:g}` with even steps at their entropy (a reference: cannot be read in place)",
            "even steps at their entropy, with token classes",
            SOURCE,
            functools.partial(store, rate=rate),
        )
        for rate in RATES
    ]
