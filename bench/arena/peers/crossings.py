"""Crossings: the quantisers of KIVI, TurboQuant and llama.cpp with our classes of tokens, all else as theirs.

What do classes alone bring? Tokens are sorted by the attention that they receive and cut into classes, as `bits=` does
(the same importance, and the same sizes: 2, 10, 30 and 58 %). The peer's quantiser then codes each class by itself. At
b bits, the last class gets b - 1, which pays for b + 3, b + 2 and b + 1 in the others: the mean is b - .02. (With
fewer classes, in a short prompt, the first ones are missing; one class gets b.) So no other monotone choice of whole
widths takes less from the least important tokens. Choosing widths for each head by the weighted squared error was
worse. The class of every token is counted, 2 bits, half of them for K and half for V. KIVI's groups of 32 keys are
neighbours in a class.

There are rows with classes for K and V, and with classes for V only: keys are not centred, so that tokens which lose a
bit move all logits of a head to one side, and 2 bits become useless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from bench.arena.classes import Classes, classes_of
from bench.arena.peers import hadamard, kivi, turboquant
from bench.arena.stored import Layer, Method, Stored
from bench.arena.windows import Coder, between, stored
from grace_opt.hf import CalibratedBasis

WIDTHS = (4, 3, 2)
#: What the classes have more than the mean, most important first.
MORE = (3, 2, 1, -1)
#: Bits that say which class a token is of, for K and V together.
CLASS_BITS = 2

#: Codes tokens ``(H, n, d)`` with some bits.
Quantiser = Callable[[Tensor, int], tuple[Tensor, float]]


def class_widths(classes: int, bits: int) -> tuple[int, ...]:
    """Return the width of each class.

    Examples
    --------
    >>> class_widths(4, 3), class_widths(2, 3), class_widths(1, 3)
    ((6, 5, 4, 2), (4, 2), (3,))
    """
    return (bits,) if classes == 1 else tuple(bits + more for more in MORE[-classes:])


def in_classes(tokens: Tensor, bits: int, quantise: Quantiser, classes: Classes) -> tuple[Tensor, float]:
    """Quantise tokens ``(H, n, d)`` class by class; return them read again, and their bits with the classes' own."""
    parts = classes.sorted(tokens)
    found = [quantise(part, width) for part, width in zip(parts, class_widths(len(parts), bits), strict=True)]
    own = CLASS_BITS / 2 * tokens.shape[:2].numel()
    return classes.restored([read for read, _ in found]), sum(spent for _, spent in found) + own


def _all_alike(tokens: Tensor, bits: int, quantise: Quantiser) -> tuple[Tensor, float]:
    return quantise(tokens, bits)


def store(
    layers: list[Layer],
    basis: CalibratedBasis | None,
    *,
    bits: int,
    quantisers: tuple[Quantiser, Quantiser],
    values_only: bool,
) -> list[Stored]:
    """Store a prompt."""
    found = []
    for layer in layers:
        classes = classes_of(layer, between(layer.keys.shape[1]))
        coders: list[Coder] = [
            functools.partial(in_classes, bits=bits, quantise=quantise, classes=classes) for quantise in quantisers
        ]
        if values_only:
            coders[0] = functools.partial(_all_alike, bits=bits, quantise=quantisers[0])
        found.append(stored(layer, coders[0], coders[1]))
    return found


def methods() -> list[Method]:
    """Return three peers with classes, at every width, for K and V and for V only."""
    groups = kivi.GROUPS[0]
    peers: dict[str, tuple[str, str, tuple[Quantiser, Quantiser]]] = {
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
            f"{name.format(bits)}-{'value-' if values_only else ''}classes",
            f"{family}, {bits} bits on average, with our classes of {'values' if values_only else 'tokens'} (crossing)",
            f"{family} with {'value' if values_only else 'token'} classes",
            source,
            functools.partial(store, bits=bits, quantisers=quantisers, values_only=values_only),
        )
        for name, (family, source, quantisers) in peers.items()
        for values_only in (False, True)
        for bits in WIDTHS
    ]
