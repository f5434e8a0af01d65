"""Crossings: the quantisers of KIVI, TurboQuant and llama.cpp with our classes of tokens, all else as theirs.

What do classes alone bring? Tokens are sorted by the attention that they receive and cut into classes, as `bits=` does
(the same importance, and the same sizes: 2, 10, 30 and 58 %). The peer's quantiser then codes each class by itself, in
whole widths, of which the first classes have b + 3, b + 2 and b + 1. There are two kinds of rows:

- The last class has b - 1, which pays for the others: the mean is b - .02, to be compared with the peer at b bits. No
  other falling choice of whole widths takes less from the least important tokens.
- The last class has b: the mean is b + .56, to be compared with the peer's line between its points. In the first kind,
  one bit for the last class makes keys useless: no peer centres them, and the logits of all its tokens move.

Short prompts have fewer classes: the first ones are missing, and one class alone has b. Choosing widths for each head
by its weighted squared error was worse than one choice for all. The class of every token is counted, 2 bits, half of
them for K and half for V. KIVI's groups of 32 keys are neighbours in a class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from bench.arena.peers import hadamard, kivi, turboquant
from bench.arena.prompt import Classes, classes_of
from bench.arena.stored import Layer, Method, Stored, between, stored
from grace_opt.hf import CalibratedBasis

WIDTHS = (3, 2)
#: What all classes but the last have more than b bits, most important first.
MORE = (3, 2, 1)
#: Bits that say which class a token is of, for K and V together.
CLASS_BITS = 2

#: Codes tokens ``(H, n, d)`` with some bits.
Quantiser = Callable[[Tensor, int], tuple[Tensor, float]]


def class_widths(classes: int, bits: int, last: int) -> tuple[int, ...]:
    """Return the width of each class; the last of several has `last` bits more than `bits`.

    Examples
    --------
    >>> class_widths(4, 3, -1), class_widths(2, 3, 0), class_widths(1, 3, -1)
    ((6, 5, 4, 2), (4, 3), (3,))
    """
    if classes == 1:
        return (bits,)
    return (*(bits + more for more in MORE[-(classes - 1) :]), bits + last)


def in_classes(tokens: Tensor, bits: int, last: int, quantise: Quantiser, classes: Classes) -> tuple[Tensor, float]:
    """Quantise tokens ``(H, n, d)`` class by class; return them read again, and their bits with the classes' own."""
    parts = classes.sorted(tokens)
    widths = class_widths(len(parts), bits, last)
    found = [quantise(part, width) for part, width in zip(parts, widths, strict=True)]
    own = CLASS_BITS / 2 * tokens.shape[:2].numel()
    return classes.restored([read for read, _ in found]), sum(spent for _, spent in found) + own


def store(
    layers: list[Layer],
    basis: CalibratedBasis | None,
    *,
    bits: int,
    last: int,
    quantisers: tuple[Quantiser, Quantiser],
) -> list[Stored]:
    """Store a prompt."""
    found = []
    for layer in layers:
        classes = classes_of(layer, between(layer.keys.shape[1]))
        coders = [
            functools.partial(in_classes, bits=bits, last=last, quantise=quantise, classes=classes)
            for quantise in quantisers
        ]
        found.append(stored(layer, coders[0], coders[1]))
    return found


def methods() -> list[Method]:
    """Return three peers with classes, at every width, at the same mean and with more for the first classes."""
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
    kinds = (
        (-1, "classes", "on average", "with token classes, same mean"),
        (0, "classes-plus", "or more", "with token classes"),
    )
    return [
        Method(
            f"{name.format(bits)}-{kind}",
            f"{family} with our classes of tokens, {bits} bits {amount} (crossing)",
            f"{family} {line}",
            source,
            functools.partial(store, bits=bits, last=last, quantisers=quantisers),
        )
        for name, (family, source, quantisers) in peers.items()
        for last, kind, amount, line in kinds
        for bits in WIDTHS
    ]
