r"""A line to compare with: Gaussian noise of the test channel at a given rate, in place of any code.

What it is. Each coordinate of the calibrated basis gets a rate R by reverse water-filling: half log2 of its loss over
the water level, none below. Its numbers z, of variance σ² in this prompt and with their mean removed, are replaced by
:math:`(1 - 4^{-R}) z + \sigma \sqrt{4^{-R} (1 - 4^{-R})}\, n` with n seeded Gaussian noise. Their squared error is
:math:`4^{-R} \sigma^2`: what an ideal code of long blocks reaches for a Gaussian source at R bits, and no code below.
K and V each have the mean rate stated. It is shared among layers and heads as the calibration shares bits
(`CalibratedBasis.shares`); within a head, one water level serves K's channels, and one V's. Means, rates and the basis
are not counted.

Without token classes, a coordinate's loss is its calibrated energy, as its calibrated variance is one. With them,
what `bits=` looks at takes the place of that: the energy of this prompt's queries and the squares of each class's
tokens times their weights, so each class has rates of its own. The second line is what our decisions would give with
ideal codes in place of scalar ones, and without a bit for scales.

What it is not. No bound: a better basis, better shares or weights, or a prompt that is no Gaussian source, may do
better at the same rate. And no method: nothing is stored.

Source: reverse water-filling and the test channel, Cover & Thomas, Elements of Information Theory, 10.3.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from bench.arena.prompt import Classes, classes_of
from bench.arena.stored import Coder, Layer, Method, Stored, between, stored
from grace_opt.errors import CalibrationError
from grace_opt.hf import CalibratedBasis
from grace_opt.hf.bases.basis import Basis, energy_in
from grace_opt.hf.bases.importance import KEPT

SOURCE = "Gaussian test channel, Cover & Thomas 10.3"
RATES = (4.0, 3.0, 2.25, 2.0, 1.5, 1.0)
SEED = 0


def water_filled(losses: Tensor, shares: Tensor, mean: Tensor) -> Tensor:
    """Return the rate of each component by reverse water-filling, ``(H, K)`` float64.

    Parameters
    ----------
    losses : Tensor
        ``(H, K)``: what each component loses without any bits, per number.
    shares : Tensor
        ``(K,)``: each component's share of the head's numbers.
    mean : Tensor
        ``(H,)``: the mean rate of each head, in bits per number.

    Examples
    --------
    >>> water_filled(torch.tensor([[16.0, 4.0, 0.25, 0.25]]), torch.full((4,), 1 / 4), torch.tensor([0.75])).tolist()
    [[2.0, 1.0, 0.0, 0.0]]
    """
    depths = losses.double().clamp(min=1e-300).log2() / 2
    order = depths.argsort(-1, descending=True)
    depth, share = depths.gather(-1, order), shares.double().expand_as(depths).gather(-1, order)
    # With the k deepest above the water: their mean depth, less what they are to have. The right k is the last whose
    # shallowest component is still above that level.
    wide = share.cumsum(-1)
    level = ((share * depth).cumsum(-1) - mean.double()[:, None]) / wide
    last = (depth > level).sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.where(mean.double()[:, None] > 0, (depths - level.gather(-1, last)).clamp(min=0), 0)


def noisy(numbers: Tensor, rates: Tensor, generator: torch.Generator) -> Tensor:
    """Send numbers ``(H, n, d)``, their means removed, through test channels of rates ``(H, d)``."""
    left = torch.exp2(-2 * rates).float()[:, None]
    spread = numbers.square().mean(1, keepdim=True).sqrt()
    noise = torch.randn(numbers.shape, generator=generator)
    return (1 - left) * numbers + spread * (left * (1 - left)).clamp(min=0).sqrt() * noise


def plain(tokens: Tensor, basis: Basis, mean: Tensor, generator: torch.Generator) -> tuple[Tensor, float]:
    """Send tokens ``(H, n, d)`` through test channels, without classes; return them, and their bits."""
    count, width = tokens.shape[1:]
    rates = water_filled(basis.energy, torch.full((width,), 1 / width), mean)
    turned = tokens @ basis.encode
    centre = turned.mean(1, keepdim=True)
    found = (noisy(turned - centre, rates, generator) + centre) @ basis.decode
    return found, float(mean.sum()) * count * width


def in_classes(
    tokens: Tensor, basis: Basis, mean: Tensor, generator: torch.Generator, classes: Classes, weights: Tensor
) -> tuple[Tensor, float]:
    """Send tokens through test channels that each class has of its own; `weights` ``(H, n)`` are in its order."""
    heads, count, width = tokens.shape
    turned = tokens @ basis.encode
    centre = turned.mean(1, keepdim=True)
    parts = classes.sorted(turned - centre)
    squares = [
        (part.double().square() * share[..., None]).mean(1)
        for part, share in zip(parts, classes.split(weights), strict=True)
    ]
    losses = (torch.stack(squares, 1) * basis.energy[:, None]).flatten(1)
    shares = torch.tensor(classes.sizes, dtype=torch.float64).repeat_interleave(width) / (count * width)
    rates = water_filled(losses, shares, mean).view(heads, len(parts), width)
    changed = [noisy(part, rates[:, number], generator) for number, part in enumerate(parts)]
    return (classes.restored(changed) + centre) @ basis.decode, float(mean.sum()) * count * width


def store(layers: list[Layer], basis: CalibratedBasis | None, *, rate: float, with_classes: bool) -> list[Stored]:
    """Send a prompt through test channels.

    Raises
    ------
    CalibrationError
        Without a calibrated basis, or with one that lacks a layer.
    """
    basis, shares = shares_of(layers, basis, rate)
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for layer in layers:
        keys, values = basis.keys[layer.index], basis.values[layer.index]
        coders: list[Coder] = []
        classes = classes_of(layer, between(layer.keys.shape[1])) if with_classes else None
        for number, (own, mean) in enumerate(
            zip((asked(keys, layer) if with_classes else keys, values), shares[layer.index], strict=True)
        ):
            if classes is None:
                coders.append(functools.partial(plain, basis=own, mean=mean, generator=generator))
            else:
                more = functools.partial(in_classes, classes=classes, weights=classes.weights[number])
                coders.append(functools.partial(more, basis=own, mean=mean, generator=generator))
        found.append(stored(layer, coders[0], coders[1]))
    return found


def shares_of(
    layers: list[Layer], basis: CalibratedBasis | None, rate: float
) -> tuple[CalibratedBasis, dict[int, tuple[Tensor, Tensor]]]:
    """Return the basis, and the rates of the heads of each layer's keys and values.

    Raises
    ------
    CalibrationError
        Without a calibrated basis, or with one that lacks a layer.
    """
    if basis is None:
        raise CalibrationError("this method needs a calibrated basis; give one, or leave the method out")
    missing = [layer.index for layer in layers if layer.index not in basis.keys]
    if missing:
        raise CalibrationError(f"the calibrated basis has no layers {missing}; make one for this model")
    return basis, basis.shares(rate, rate)


def asked(basis: Basis, layer: Layer) -> Basis:
    """Return the basis with the energies of every eighth of the prompt's queries, as `bits=` measures them."""
    queries = layer.queries[:, :, ::KEPT].flatten(1, 2).double()
    return replace(basis, energy=energy_in(basis, queries.mT @ queries / queries.shape[1]))


def methods() -> list[Method]:
    """Return every rate, without token classes and with them."""
    return [
        Method(
            f"reference-{rate:g}{'-classes' if with_classes else ''}",
            f"Gaussian noise of the test channel at {rate:g} bits{' with token classes' if with_classes else ''} "
            "(a reference, not a bound)",
            f"test channel{' with token classes' if with_classes else ''}",
            SOURCE,
            functools.partial(store, rate=rate, with_classes=with_classes),
        )
        for with_classes in (False, True)
        for rate in RATES
    ]
