"""Crossings: quantisers of KIVI, TurboQuant and llama.cpp with our classes of tokens, everything else as theirs.

What do classes alone bring? Tokens are sorted by the attention that they receive and cut into classes, as `bits=` does
(the same importance, class sizes and token weights). The peer's quantiser then codes each class by itself, at one
width per class and head, out of 1 to 6 and 8. Among all combinations that take no more bits than the peer takes
without classes at its one width, the one with the least weighted squared error is taken, that error being measured
with the peer's own quantiser. The bits include the class of every token, 2 bits, half of them counted for K and half
for V; as `compressed` tokens stay in place, nothing else is added.

Their widths are chosen within each head; how `bits=` shares bits among channels, heads and layers is not used.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from bench.arena.classes import Classes, classes_of
from bench.arena.peers import hadamard, kivi, turboquant
from bench.arena.stored import Layer, Method, Stored
from bench.arena.windows import between, stored
from grace_opt.hf import CalibratedBasis

WIDTHS = (4, 3, 2)
#: What a class can have.
CLASS_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
#: Bits that say which class a token is of, for K and V together.
CLASS_BITS = 2

#: Codes tokens ``(H, n, d)`` with some bits.
Quantiser = Callable[[Tensor, int], tuple[Tensor, float]]


def chosen(errors: Tensor, costs: Tensor, budget: float) -> Tensor:
    """Return the widths with the least error within a budget, ``(H, C)`` places in `CLASS_WIDTHS`.

    Parameters
    ----------
    errors : Tensor
        ``(H, C, W)``: each head's error in each class at each width.
    costs : Tensor
        ``(C, W)``: bits.
    budget : float
        Bits of a head. If it is too small for any combination, all have the fewest bits.
    """
    classes, widths = costs.shape
    every = torch.tensor(list(itertools.product(range(widths), repeat=classes)))
    place = torch.arange(classes)
    total = sum(errors[:, number][:, every[:, number]] for number in range(classes))
    assert isinstance(total, Tensor)
    allowed = costs[place, every].sum(-1) <= budget + 1e-6
    allowed[0] |= not allowed.any()
    return every[total.masked_fill(~allowed, torch.inf).argmin(-1)]


def in_classes(
    tokens: Tensor, bits: int, quantise: Quantiser, classes: Classes, weights: Tensor
) -> tuple[Tensor, float]:
    """Quantise tokens ``(H, n, d)`` class by class; return them read again, and their bits with the classes' own."""
    heads, count = tokens.shape[:2]
    read, errors, costs = [], [], []
    for part, share in zip(classes.sorted(tokens), classes.split(weights), strict=True):
        tried = [quantise(part, each) for each in CLASS_WIDTHS]
        read.append(torch.stack([each for each, _ in tried], 1))  # (H, W, n_c, d)
        errors.append(((read[-1] - part[:, None]).square().sum(-1) * share[:, None]).sum(-1))
        costs.append([spent / heads for _, spent in tried])
    own = CLASS_BITS / 2 * count
    cost = torch.tensor(costs, dtype=torch.float64)
    widths = chosen(torch.stack(errors, 1).double(), cost, quantise(tokens, bits)[1] / heads - own)
    row = torch.arange(heads)
    found = classes.restored([each[row, widths[:, number]] for number, each in enumerate(read)])
    return found, float(cost[torch.arange(len(cost)), widths].sum()) + heads * own


def store(
    layers: list[Layer], basis: CalibratedBasis | None, *, bits: int, quantisers: tuple[Quantiser, Quantiser]
) -> list[Stored]:
    """Store a prompt."""
    found = []
    for layer in layers:
        inner = between(layer.keys.shape[1])
        classes = classes_of(layer, inner)
        coders = [
            functools.partial(in_classes, bits=bits, quantise=quantise, classes=classes, weights=weights)
            for quantise, weights in zip(quantisers, classes.weights, strict=True)
        ]
        found.append(stored(layer, coders[0], coders[1]))
    return found


def methods() -> list[Method]:
    """Return three peers with classes, at every width."""
    groups = kivi.GROUPS[0]
    peers = {
        f"kivi-{{}}-g{groups[0]}": (
            "KIVI",
            kivi.SOURCE,
            (functools.partial(kivi.per_channel, group=groups[0]), functools.partial(kivi.per_token, group=groups[1])),
        ),
        "turboquant-{}": (
            "TurboQuant",
            turboquant.SOURCE,
            (turboquant.quantised, functools.partial(turboquant.quantised, seed=turboquant.SEED + 1)),
        ),
        "hadamard-{}": (
            "Hadamard",
            hadamard.SOURCE,
            (hadamard.rotated, functools.partial(hadamard.rotated, largest=hadamard.VALUE_ROTATION)),
        ),
    }
    return [
        Method(
            f"{name.format(bits)}-classes",
            f"{family} with our token classes, at no more bits than {family} with {bits} (crossing)",
            f"{family} with token classes",
            source,
            functools.partial(store, bits=bits, quantisers=quantisers),
        )
        for name, (family, source, quantisers) in peers.items()
        for bits in WIDTHS
    ]
