"""Corrections for tokens that come after the prompt: the means of some channels move away from those of the prompt.

Rotary embeddings turn the mean of the keys with the position. After some thousand tokens, a few channels are several
standard deviations away from where the prompt's were, and those with many bits are cut. So each block of newer tokens
corrects a few means and scales of each head: those that lessen the error most. A correction holds for later blocks as
well, until the same mean or scale is corrected again.

Source: sparse forward-adaptive quantisation (Jayant & Noll, Digital Coding of Waveforms, chapter 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: Means that a block corrects, and scales, as a share of a head's channels; values have no rotation.
CORRECTED = {"keys": 3 / 32, "values": 1 / 32}
#: Corrections take at most this share of a block's bits.
LARGEST_SHARE = 1 / 16
#: The factor of a scale is 2^((code - UNCHANGED) / STEPS_PER_OCTAVE).
UNCHANGED, STEPS_PER_OCTAVE = 128, 4
#: Changes of a code that are tried: from half the scale to four times as much.
_TRIED = tuple(range(-4, 9))
_LARGEST = float(torch.finfo(torch.float16).max)
_BYTE = 256


@dataclass(frozen=True)
class Drift:
    """What each of N blocks of newer tokens has corrected: n means and n scales of each head.

    Attributes
    ----------
    channels : Tensor
        ``(N, H, n)`` uint8, or int16 for more than 256 channels: whose means are corrected.
    means : Tensor
        ``(N, H, n)`` float16: their means from that block on, in units of the codes.
    scales : Tensor
        ``(N, H, n)`` uint8, or int16 for more than 256: which scales are corrected, ``class * d + channel``.
    factors : Tensor
        ``(N, H, n)`` uint8: codes of what these scales are multiplied by from that block on.
    """

    channels: Tensor
    means: Tensor
    scales: Tensor
    factors: Tensor

    @classmethod
    def none(cls, heads: int, width: int, classes: int, count: int, device: torch.device) -> Drift:
        """Return the corrections of no block yet, `count` means and as many scales each."""

        def empty(dtype: torch.dtype) -> Tensor:
            return torch.zeros(0, heads, count, dtype=dtype, device=device)

        return cls(empty(_index(width)), empty(torch.float16), empty(_index(classes * width)), empty(torch.uint8))

    def tables(self, means: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return what holds for each block, the prompt first.

        Parameters
        ----------
        means : Tensor
            ``(H, d)``: those of the prompt.
        classes : int

        Returns
        -------
        means, factors : Tensor
            ``(N + 1, H, d)`` float32, and codes ``(N + 1, C, H, d)`` int32.
        """
        heads, width = means.shape
        unchanged = torch.full((heads, classes * width), UNCHANGED, dtype=torch.int32, device=means.device)
        factors = _held(unchanged, self.scales, self.factors)
        return _held(means.float(), self.channels, self.means), factors.view(-1, heads, classes, width).transpose(1, 2)

    def with_block(self, means: tuple[Tensor, Tensor], factors: tuple[Tensor, Tensor]) -> Drift:
        """Append the corrections of a block: each of both is ``(H, n)``, places and what holds there from now on."""
        new = (means[0], means[1], factors[0], factors[1])
        old = (self.channels, self.means, self.scales, self.factors)
        return Drift(*(torch.cat([have, more[None].to(have.dtype)]) for have, more in zip(old, new, strict=True)))


def _index(largest: int) -> torch.dtype:
    return torch.uint8 if largest <= _BYTE else torch.int16


def _held(first: Tensor, places: Tensor, corrected: Tensor) -> Tensor:
    """Return what holds for the prompt and each block, ``(N + 1, H, D)``: the latest correction of each place."""
    blocks, where = len(places), places.long()
    number = torch.arange(1, blocks + 1, device=first.device)[:, None, None]
    last = torch.zeros(blocks + 1, *first.shape, dtype=torch.long, device=first.device)
    last[1:].scatter_(2, where, number.expand_as(where))
    every = torch.zeros(blocks + 1, *first.shape, dtype=first.dtype, device=first.device)
    every[0] = first
    every[1:].scatter_(2, where, corrected.to(first.dtype))
    return every.gather(0, last.cummax(0).values)


def most_gained(gain: Tensor, before: Tensor, after: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the places ``(H, n)`` whose correction gains most, and what holds there; all inputs are ``(H, D)``.

    Where nothing is gained, that is what held before.

    Examples
    --------
    >>> gain, zeros = torch.tensor([[0.5, 2.0, -1.0]]), torch.zeros(1, 3)
    >>> most_gained(gain, zeros, zeros + 7, 3)
    (tensor([[1, 0, 2]]), tensor([[7., 7., 0.]]))
    """
    best = gain.topk(count, dim=1)
    changed = torch.where(best.values > 0, after.gather(1, best.indices), before.gather(1, best.indices))
    return best.indices, changed


def factor_of(codes: Tensor) -> Tensor:
    """Return the factors that codes stand for, float32.

    Examples
    --------
    >>> factor_of(torch.tensor([UNCHANGED, UNCHANGED + 8, UNCHANGED - 4])).tolist()
    [1.0, 4.0, 0.5]
    """
    return torch.exp2((codes.float() - UNCHANGED) / STEPS_PER_OCTAVE)


def tried_factors(codes: Tensor) -> Tensor:
    """Return the codes that a block tries, ``(F, ...)``, the one that holds among them."""
    steps = torch.tensor(_TRIED, device=codes.device).view(-1, *[1] * codes.dim())
    return (codes + steps).clamp(0, _BYTE - 1)


def stored_means(means: Tensor) -> Tensor:
    """Return means as float16 holds them, float32."""
    return means.clamp(-_LARGEST, _LARGEST).to(torch.float16).float()


def correction_bits(width: int, classes: int) -> int:
    """Return the bits of one corrected mean and one corrected scale.

    Examples
    --------
    >>> correction_bits(64, 4), correction_bits(128, 4)
    (40, 48)
    """
    return 8 * (_index(width).itemsize + 2 + _index(classes * width).itemsize + 1)


def corrections(kind: Literal["keys", "values"], width: int, classes: int, bits: float) -> int:
    """Return how many means, and scales, of a head a block corrects, if it has so many bits per head.

    Examples
    --------
    >>> corrections("keys", 64, 4, 2.25 * 64 * 64), corrections("values", 64, 4, 64 * 64 / 8)
    (6, 0)
    """
    return min(math.ceil(CORRECTED[kind] * width), int(LARGEST_SHARE * bits / correction_bits(width, classes)))
