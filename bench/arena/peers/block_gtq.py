"""Block-GTQ (arXiv 2606.24033): bits per RoPE pair, by greed, with TurboQuant's quantiser.

RoPE turns channels i and i + d/2 together, so each such pair is given its own number of bits. A pair's score is half
the sum of the mean squares of its queries and of its keys; a turn by RoPE does not change it. Every pair starts with
one bit, and the next bit goes to the pair with the largest score / 4^bits, up to eight, until the mean is reached. In
each KV head, the pairs with equally many bits are one vector for TurboQuant: a norm per token in 16 bits, a random
rotation, Lloyd-Max levels of a Gaussian. As in the authors' code, and unlike TurboQuant, what is read has the norm that
was stored. Values are TurboQuant's at the same number of bits.

Taken from the authors' public code. One norm for each number of bits that occurs makes the keys' bits at d = 64 about
one more than the mean of the codes: they are counted. The paper calibrates scores offline; ours are the prompt's own,
and the widths are not counted, in the peer's favour.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bench.arena.peers.turboquant import nearest, quantised, rotation
from bench.arena.stored import PARAMETER_BITS, Layer, Method, Stored, in_16_bits, stored
from grace_opt.errors import OptionError
from grace_opt.hf import CalibratedBasis
from grace_opt.hf.bases.codebooks import gaussian_levels

SOURCE = "Block-GTQ, arXiv 2606.24033"
WIDTHS = (4, 3, 2)
FEWEST, MOST = 1, 8


def pair_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the score of each RoPE pair ``(H, d/2)``, from queries ``(H, m, d)`` and keys ``(H, n, d)``."""
    if keys.shape[-1] % 2:
        raise OptionError(f"Block-GTQ needs RoPE's pairs of channels, and the heads have {keys.shape[-1]} channels")
    energy = queries.double().square().mean(1) + keys.double().square().mean(1)
    first, second = energy.chunk(2, dim=-1)
    return (first + second) / 2


def greedy(scores: Tensor, bits: int) -> Tensor:
    """Give each pair its bits ``(H, d/2)``, `bits` per pair on average; ties go to the lowest index.

    Examples
    --------
    >>> greedy(torch.tensor([[8.0, 1.0, 1.0]]), 2)
    tensor([[3, 2, 1]])
    """
    heads, pairs = scores.shape
    found = torch.full_like(scores, FEWEST, dtype=torch.long)
    row = torch.arange(heads)
    for _ in range(pairs * (bits - FEWEST)):
        gain = (scores * 4.0**-found).masked_fill(found >= MOST, -1)
        found[row, gain.argmax(-1)] += 1
    return found


def coded(tokens: Tensor, widths: Tensor) -> tuple[Tensor, float]:
    """Quantise keys ``(H, n, d)`` with widths per pair ``(H, d/2)``; return them read again, and their bits."""
    found, spent = torch.empty_like(tokens), 0.0
    for head, own in enumerate(widths.repeat(1, 2)):  # channel i and channel i + d/2
        for bits in own.unique().tolist():
            channels = torch.nonzero(own == bits)[:, 0]
            part = tokens[head][:, channels]
            norm = part.norm(dim=-1, keepdim=True)
            turn = rotation(len(channels), 42 + bits)
            levels = torch.tensor(gaussian_levels(bits)) / len(channels) ** 0.5
            read = nearest(part / torch.where(norm > 0, norm, 1) @ turn.T, levels)
            length = read.norm(dim=-1, keepdim=True).clamp(min=1e-10)
            found[head][:, channels] = in_16_bits(norm) * (read / length) @ turn
            spent += part.numel() * bits + PARAMETER_BITS * len(part)
    return found, spent


def store(layers: list[Layer], basis: CalibratedBasis | None, *, bits: int) -> list[Stored]:
    """Store a prompt."""
    found = []
    for layer in layers:
        widths = greedy(pair_scores(layer.queries.flatten(1, 2), layer.keys), bits)
        values = functools.partial(quantised, bits=bits)
        found.append(stored(layer, functools.partial(coded, widths=widths), values))
    return found


def methods() -> list[Method]:
    """Return every mean width."""
    return [
        Method(
            f"block-gtq-{bits}",
            f"Block-GTQ, {bits} bits per channel on average (our implementation)",
            "Block-GTQ",
            SOURCE,
            functools.partial(store, bits=bits),
        )
        for bits in WIDTHS
    ]
