"""RDKV (arXiv 2605.08317): reverse water-filling of bits over the tokens of V and over the channels of K.

A token of V is worth the attention that it receives from the last 32 queries, averaged with its two neighbours on
each side; a channel of K is worth the product of its mean squares in those queries and in all keys (as in ThinK). Each
head's widths minimise the sum of worth times the error that the authors measured for a width (normalised: 1 without
bits, .277 or .312 at two, …), within a mean, by a Lagrangian. Tokens of V get {2, 4, 8, 16} bits, channels of K
{0, 2, 4, 8}; both are quantised asymmetrically over the whole token or channel, step and zero point in 16 bits, the
zero point rounded to a whole step. Widths are counted with 2 bits each.

Taken from the authors' public code, with half of the bits for K as there. It differs in two ways: tokens are never
given 0 bits (there, they are evicted from K and V together, which is what the eviction rows measure), and their code
limits zero points to the codes' range, which a channel far from zero does not survive; the README's formula does not.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bench.arena.stored import PARAMETER_BITS, Layer, Method, Stored, between, in_16_bits, stored
from grace_opt.hf import CalibratedBasis

SOURCE = "RDKV, arXiv 2605.08317"
#: The mean width of the codes; values have half a bit more for their parameters at d = 64.
BITS = (4.0, 3.0, 2.5)
OBSERVED, NEIGHBOURS = 32, 2
#: Mean squared errors by width, as shares of the variance; the authors' defaults.
KEY_ERRORS = {0: 1.0, 2: 0.277, 4: 0.011, 8: 0.000061}
VALUE_ERRORS = {2: 0.312, 4: 0.0138, 8: 0.000048, 16: 0.0}
WIDTH_BITS = 2
#: Up to here, 16 bits have every whole number.
_LARGEST_ZERO = 2047


def filled(worth: Tensor, mean: float, errors: dict[int, float]) -> Tensor:
    """Return the width of each of some parts ``(H, n)`` that lose worth times error, at most `mean` on average.

    Examples
    --------
    >>> filled(torch.tensor([[9.0, 1.0, 0.1]]), 4.0, VALUE_ERRORS)
    tensor([[4, 4, 2]])
    """
    widths = torch.tensor(list(errors), dtype=torch.float64)
    loss = worth.double()[..., None] * torch.tensor(list(errors.values()), dtype=torch.float64)
    low = torch.zeros(len(worth), dtype=torch.float64)
    high = loss.amax((1, 2)).clamp(min=1e-300)  # at this price no part takes more than the fewest bits
    for _ in range(100):
        middle = (low + high) / 2
        taken = widths[(loss + middle[:, None, None] * widths).argmin(-1)].mean(-1)
        low, high = torch.where(taken > mean, middle, low), torch.where(taken > mean, high, middle)
    return widths[(loss + high[:, None, None] * widths).argmin(-1)].long()


def affine(rows: Tensor, bits: int) -> Tensor:
    """Quantise rows ``(..., n)`` asymmetrically with a whole zero point, and read them again."""
    lowest, highest = rows.aminmax(dim=-1, keepdim=True)
    # Not so small that the zero point is beyond the whole numbers of 16 bits.
    step = torch.maximum((highest - lowest) / (2**bits - 1), lowest.abs() / _LARGEST_ZERO).clamp(min=1e-7)
    step = in_16_bits(step)
    zero = in_16_bits((-lowest / step).round())
    return step * ((rows / step + zero).round().clamp(0, 2**bits - 1) - zero)


def mixed(rows: Tensor, widths: Tensor) -> tuple[Tensor, float]:
    """Quantise each of some rows ``(H, m, n)`` with its own width ``(H, m)``; return them, and their bits."""
    found, spent = torch.zeros_like(rows), float(WIDTH_BITS * widths.numel())
    for bits in widths.unique().tolist():
        chosen = widths == bits
        some = rows[chosen]
        if bits == 16:
            found[chosen] = in_16_bits(some)
        elif bits:
            found[chosen] = affine(some, bits)
        spent += bits * some.numel() + (2 * PARAMETER_BITS * len(some) if 0 < bits < 16 else 0)
    return found, spent


def token_worth(layer: Layer) -> Tensor:
    """Return the attention that each token receives from the last queries ``(H, T)``, averaged over neighbours."""
    tokens = layer.keys.shape[1]
    last = min(OBSERVED, tokens)
    logits = layer.scaling * layer.queries[:, :, -last:] @ layer.keys[:, None].mT
    place = torch.arange(tokens)
    seen = place <= place[-last:, None]
    received = logits.masked_fill(~seen, -torch.inf).softmax(-1).sum((1, 2))
    reach = min(NEIGHBOURS, tokens - 1)
    padded = torch.nn.functional.pad(received[:, None], (reach, reach), mode="reflect") if reach else received[:, None]
    return torch.nn.functional.avg_pool1d(padded, 2 * reach + 1, stride=1)[:, 0]


def channel_worth(layer: Layer) -> Tensor:
    """Return the worth of each channel of K ``(H, d)``."""
    return layer.queries[:, :, -OBSERVED:].square().mean((1, 2)) * layer.keys.square().mean(1)


def store(layers: list[Layer], basis: CalibratedBasis | None, *, bits: float) -> list[Stored]:
    """Store a prompt."""
    found = []
    for layer in layers:

        def keys(rows: Tensor, layer: Layer = layer) -> tuple[Tensor, float]:
            read, spent = mixed(rows.mT.contiguous(), filled(channel_worth(layer), bits, KEY_ERRORS))
            return read.mT, spent

        def values(rows: Tensor, layer: Layer = layer) -> tuple[Tensor, float]:
            worth = token_worth(layer)[:, between(layer.keys.shape[1])]
            return mixed(rows, filled(worth, bits, VALUE_ERRORS))

        found.append(stored(layer, keys, values))
    return found


def methods() -> list[Method]:
    """Return every mean width."""
    return [
        Method(
            f"rdkv-{bits:g}",
            f"RDKV without eviction, {bits:g} bits (our implementation)",
            "RDKV",
            SOURCE,
            functools.partial(store, bits=bits),
        )
        for bits in BITS
    ]
