"""After AATC (arXiv 2608.14191): decorrelated channels, bits by reverse water-filling of the attention output's error.

The paper's text was out of reach; this follows two published summaries of it. Keys and values are turned into
uncorrelated channels. An error in channel c of the keys, times the square of the queries' entry there, counts by
a² |v W_O - o|², and an error in channel c of the values by a² times the squared length of W_O's row: sums over tokens
of attention a, means over queries. One water level serves the channels of all layers and heads, K and V together;
rates are rounded to whole bits, and channels below the water have none. Each token is scaled by its largest entry, in
16 bits, and each channel divided evenly into its 2^bits steps.

Where the summaries leave a choice: the paper turns keys before RoPE, by an SVD of whitened projections; we have the
keys after it, and take the eigenvectors of their second moments, the prompt's own (not counted, in the peer's favour;
the paper calibrates). Channels are divided by their root mean square before the token's largest entry is taken. Each
layer's error counts relative to its output's mean square: without that, layers with small outputs get no bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.arena.stored import PARAMETER_BITS, Layer, Method, Stored, between, in_16_bits, stored
from grace_opt.hf import CalibratedBasis

SOURCE = "after AATC, arXiv 2608.14191, from summaries"
BITS = (4.0, 3.0, 2.5, 2.0)
MOST = 8
#: Distance between the queries whose attention is looked at.
STRIDE = 32


@dataclass(frozen=True)
class Channels:
    """Uncorrelated channels of one layer's keys, or values.

    Attributes
    ----------
    turn : Tensor
        ``(H, d, d)`` orthogonal: channels are ``x @ turn``.
    power : Tensor
        ``(H, d)``: their mean squares.
    weight : Tensor
        ``(H, d)``: what a squared error in each costs.
    """

    turn: Tensor
    power: Tensor
    weight: Tensor


def decorrelated(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvectors and eigenvalues of second moments ``(H, d, d)``, ``(H, d)``, largest first."""
    wide = tokens.double()
    values, vectors = torch.linalg.eigh(wide.mT @ wide / max(wide.shape[1], 1))
    return vectors.flip(-1), values.flip(-1).clamp(min=0)


def channels_of(layer: Layer) -> tuple[Channels, Channels]:
    """Return the channels of a layer's keys and values."""
    inner = between(layer.keys.shape[1])
    key_turn, key_power = decorrelated(layer.keys[:, inner])
    value_turn, value_power = decorrelated(layer.values[:, inner])
    tokens = layer.keys.shape[1]
    asked = torch.arange(tokens - 1, -1, -STRIDE)
    queries = layer.queries[:, :, asked].double()  # (H, G, S, d)
    keys, values, output = layer.keys.double(), layer.values.double(), layer.output.double()
    logits = layer.scaling * queries @ keys[:, None].mT
    squares = logits.masked_fill(torch.arange(tokens) > asked[:, None], -torch.inf).softmax(-1)
    found = squares @ values[:, None]  # (H, G, S, d_v)
    squares = squares.square()
    metric = output @ output.mT  # (H, G, d_v, d_v)
    own = ((values[:, None] @ metric) * values[:, None]).sum(-1)  # |v W_O|² of every token, (H, G, T)
    cross = (found @ metric) @ values[:, None].mT
    length = ((found @ metric) * found).sum(-1)
    distance = (own[:, :, None] - 2 * cross + length[..., None]).clamp(min=0)  # |v W_O - o|², (H, G, S, T)
    felt = (squares * distance).sum(-1)
    whole = torch.einsum("hgsv,hgvo->so", found, output).square().sum(-1).mean().clamp(min=1e-300)
    turned = layer.scaling * queries @ key_turn[:, None]
    key_weight = (felt[..., None] * turned.square()).mean(2).sum(1) / whole
    rows = torch.einsum("hgvo,hvc->hgco", output, value_turn).square().sum(-1)
    value_weight = (squares.sum(-1).mean(2)[..., None] * rows).sum(1) / whole
    return Channels(key_turn, key_power, key_weight), Channels(value_turn, value_power, value_weight)


def filled(losses: Tensor, mean: float) -> Tensor:
    """Return whole bits for each of some losses, at most `mean` on average: half log2(loss / level), rounded.

    Examples
    --------
    >>> filled(torch.tensor([16.0, 4.0, 1.0, 0.0], dtype=torch.float64), 0.75)
    tensor([2, 1, 0, 0])
    """
    half_logarithms = losses.clamp(min=1e-300).log2() / 2
    low, high = half_logarithms.min() - MOST - 1, half_logarithms.max() + 1

    def at(level: Tensor) -> Tensor:
        return (half_logarithms - level).clamp(0, MOST).round()

    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).mean() > mean else (low, middle)
    return at(high).long()


def coded(tokens: Tensor, channels: Channels, widths: Tensor) -> tuple[Tensor, float]:
    """Quantise tokens ``(H, n, d)`` with widths per channel ``(H, d)``; return them read again, and their bits."""
    root = channels.power.sqrt().clamp(min=1e-30)
    turned = (tokens.double() @ channels.turn) / root[:, None]
    kept = (widths > 0)[:, None]
    largest = in_16_bits((turned.abs() * kept).amax(-1, keepdim=True).float()).double()
    steps = 2.0 ** widths[:, None]
    code = ((turned / torch.where(largest > 0, largest, 1) + 1) / 2 * steps).floor()
    code = torch.minimum(code.clamp(min=0), steps - 1)
    read = torch.where(kept, ((code + 0.5) / steps * 2 - 1) * largest, 0)
    heads = int((widths.sum(-1) > 0).sum())  # a head without any bits needs no scales
    spent = float(widths.sum()) * tokens.shape[1] + PARAMETER_BITS * heads * tokens.shape[1]
    return ((read * root[:, None]) @ channels.turn.mT).float(), spent


def store(layers: list[Layer], basis: CalibratedBasis | None, *, bits: float) -> list[Stored]:
    """Store a prompt."""
    parts = [part for layer in layers for part in channels_of(layer)]
    losses = [(part.power * part.weight).flatten() for part in parts]
    widths = torch.split(filled(torch.cat(losses), bits), [len(each) for each in losses])
    found = []
    for number, layer in enumerate(layers):
        coders = [
            functools.partial(coded, channels=parts[at], widths=widths[at].view_as(parts[at].power))
            for at in (2 * number, 2 * number + 1)
        ]
        found.append(stored(layer, coders[0], coders[1]))
    return found


def methods() -> list[Method]:
    """Return every mean width."""
    return [
        Method(
            f"aatc-{bits:g}",
            f"after AATC, {bits:g} bits (our implementation, from summaries)",
            "AATC",
            SOURCE,
            functools.partial(store, bits=bits),
        )
        for bits in BITS
    ]
