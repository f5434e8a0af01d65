"""Tokens after the prompt: how they wait for their classes, and how they get them.

Which tokens matter shows only after many queries: classes chosen from the few that a block of 64 tokens has seen when
it leaves the recent window cost several times the error. So blocks wait with more bits than asked for, the same for
every channel, in the coordinates of the basis and with means and scales of their own, while the attention that their
tokens receive adds up. When `SETTLED` tokens wait, all but the `NEWEST` are coded together as a prompt is: classes by
the attention received from all queries since, means, widths and scales of their own, and as many bits per element as
the prompt has. The newest go on waiting: they are attended to most, and few queries have seen them.

Waiting tokens count as what they take. There are fewer than `SETTLED` of them, whatever the length of the sequence.

Source: the residual of KIVI (arXiv 2402.02750), which keeps newer tokens dense until a group is complete; H2O (arXiv
2306.14048) for sums of attention received.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...bases.classes import class_sizes, token_weights
from ...bases.codebooks import WIDTHS
from ...models.placement import rank
from ..plan import LayerPlan
from .codes import Codes, Part, encode, stacked
from .heads import StoredHeads, code_heads
from .segment import Segment, class_of_tokens, class_weights, packed_classes, segment_bits

#: Number of waiting tokens at which the oldest of them are coded, and of those that go on waiting.
SETTLED, NEWEST = 1024, 512
#: How many bits a waiting token's key, and its value, has more than asked for, then rounded up to one of `WIDTHS`. With
#: fewer, the error of waiting outlasts it; values bear more of it than keys.
MORE_BITS = (3.5, 1.75)


def waiting_width(kind: int, bits: float) -> int:
    """Return the bits per number of waiting keys (0) or values (1) where some bits are asked for.

    Examples
    --------
    >>> [[waiting_width(kind, bits) for kind in (0, 1)] for bits in (1, 2.25, 3, 16)]
    [[5, 3], [6, 4], [8, 5], [8, 8]]
    """
    return next((width for width in WIDTHS if width >= bits + MORE_BITS[kind]), max(WIDTHS))


def waiting_codes(before: Codes | None, coordinates: Tensor, width: int, trellis: bool = False) -> Codes:
    """Append a block of waiting tokens to those before, as further heads of the same codes.

    Parameters
    ----------
    before : Codes or None
    coordinates : Tensor
        ``(H, n, d)``; n is the same for every block.
    width : int
        Bits of every number.
    trellis : bool
        Whether to code by a trellis.
    """
    heads, count, channels = coordinates.shape
    levels = torch.full((1, heads, channels), WIDTHS.index(width), dtype=torch.int64, device="cpu")
    made = encode([Part(coordinates, levels, coordinates.abs().amax((1, 2)))], (count,), trellis)
    return made if before is None else stacked(before, made)


def waiting_coordinates(codes: Codes, heads: int) -> Tensor:
    """Return the coordinates of waiting tokens ``(H, T, d)``, in the order of the sequence."""
    found = codes.decode()
    return found.view(-1, heads, *found.shape[1:]).transpose(0, 1).flatten(1, 2)


def ready(waits: int, block: int) -> int:
    """Return how many of the waiting tokens are coded now, the oldest ones: whole blocks, none while few wait.

    Examples
    --------
    >>> [ready(waits, block=64) for waits in (960, 1024, 1088)], ready(2048, block=2048)
    ([0, 512, 576], 2048)
    """
    if waits < SETTLED:
        return 0
    return max((waits - NEWEST) // block, 1) * block


def settled(
    plan: LayerPlan,
    waiting: tuple[Tensor, Tensor],
    received: Tensor,
    energies: tuple[Tensor, Tensor],
    bits: tuple[float, float],
) -> Segment:
    """Code tokens that have waited, as a segment.

    Parameters
    ----------
    plan : LayerPlan
    waiting : (Tensor, Tensor)
        Coordinates of keys ``(H, n, d)`` and of values.
    received : Tensor
        ``(H, 3, n)``: sums of the attention p that each token received and of p², over queries, and number of queries.
    energies : (Tensor, Tensor)
        ``(H, d)`` each: what a unit of squared error in each coordinate costs.
    bits : (float, float)
        Mean bits per element of keys and of values, with everything counted.
    """
    budget = plan.bits
    assert budget is not None
    heads, count = waiting[0].shape[:2]
    sizes = class_sizes(count)
    fixed = [segment_bits(count, len(sizes), each.shape[-1]) / (count * each.shape[-1]) for each in waiting]
    means = max(bits[0] - fixed[0], 0.0), max(bits[1] - fixed[1], 0.0)
    shares = budget.head_bits(plan.index, heads, rank(), means)
    queries = received[:, 2].clamp(min=1)
    first, second = received[:, 0] / queries, received[:, 1] / queries
    unseen = ~first.any(-1, keepdim=True)  # by no query: all alike
    first, second = torch.where(unseen, 1.0, first), torch.where(unseen, 1.0, second)
    classes = class_of_tokens(first, sizes)
    order = classes.argsort(dim=-1, stable=True)
    weights = [weight.gather(1, order) for weight in token_weights(first, second)]
    stored = [
        StoredHeads(tensor, order, None, weight, energy.double(), sizes, share * tensor[0].numel(), budget.trellis)
        for tensor, weight, energy, share in zip(waiting, weights, energies, shares, strict=True)
    ]
    keys, values = code_heads(stored)
    of_classes = None if budget.limit is None else class_weights(weights, sizes)
    return Segment(keys, values, packed_classes(classes), of_classes)
