r"""Bits per element that heads take at given prices per bit: how a model's bits are shared among layers and heads.

A channel of energy e whose weighted squares sum to S over a class of n tokens loses :math:`D_b\,e\,S` at width b and
costs :math:`b\,\lceil n\rceil_8 + 16` bits. All channels of a class have the same hull of (cost, distortion), scaled by
e·S; the width at a price follows from where the price lies among the hull's slopes.

Source: Lagrangian bit allocation (Shoham & Gersho, IEEE Trans. ASSP 36, 1988).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .classes import CLASS_STEP
from .codebooks import WIDTHS, distortions

#: Bits of the scale that a channel with any bits has.
SCALE_BITS = 16
#: Number of prices at which rates are kept, evenly spaced in their logarithm.
PRICES = 256
#: Prices below this share of the largest would only be for channels that hardly differ from their means.
LOWEST_PRICE = 1e-15
#: Most bits per element that a head takes.
MOST_BITS = 8.0


def hull(tokens: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower convex hull of a channel's widths in a class of some tokens.

    Returns
    -------
    costs : ndarray
        Bits of each width on the hull, ascending from 0.
    slopes : ndarray
        Distortion saved per bit of each step, descending; one fewer.

    Examples
    --------
    >>> costs, slopes = hull(8.0)
    >>> costs.tolist()
    [0.0, 32.0, 40.0, 48.0, 56.0, 64.0, 80.0]
    """
    whole = -(-tokens // CLASS_STEP) * CLASS_STEP
    costs = np.array([width * whole + SCALE_BITS * (width > 0) for width in WIDTHS])
    losses, place, kept, slopes = np.array(distortions()), 0, [0], []
    while place < len(WIDTHS) - 1:
        steep = (losses[place] - losses[place + 1 :]) / (costs[place + 1 :] - costs[place])
        step = len(steep) - 1 - int(np.argmax(steep[::-1]))
        slopes.append(float(steep[step]))
        place += step + 1
        kept.append(place)
    return costs[kept], np.array(slopes)


def steps(spread: Tensor, sizes: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the prices at which the channels of a head take more bits, and how many per element of the head.

    Parameters
    ----------
    spread : Tensor
        ``(C, H, d)`` float64: energy times weighted squares of each class, head and channel.
    sizes : sequence of float
        Number of tokens of each class.

    Returns
    -------
    prices, gains : Tensor
        ``(H, N)`` float64: at prices below, the head has so many bits per element more.
    """
    elements = sum(sizes) * spread.shape[-1]
    prices, gains = [], []
    for part, tokens in zip(spread, sizes, strict=True):
        costs, slopes = hull(tokens)
        # Both per element of the head: a price is the loss that one more bit per element of the head saves.
        prices.append((part[..., None] * torch.from_numpy(slopes * elements)).flatten(1))
        gain = torch.from_numpy(np.diff(costs) / elements).expand(*part.shape, -1)
        gains.append(gain.flatten(1))
    return torch.cat(prices, -1), torch.cat(gains, -1)


def rates(prices: Tensor, gains: Tensor, multipliers: Tensor) -> Tensor:
    """Return the bits per element of each head at each of some ascending prices, ``(H, M)`` float64."""
    ordered, order = prices.sort(-1)
    cumulated = torch.nn.functional.pad(gains.gather(-1, order).flip(-1).cumsum(-1).flip(-1), (0, 1))
    place = torch.searchsorted(ordered, multipliers.expand(len(prices), -1).contiguous(), right=True)
    return cumulated.gather(-1, place)


def price_grid(largest: float) -> Tensor:
    """Return ascending prices, ``(M,)`` float64: at the last one no channel takes any bits.

    Parameters
    ----------
    largest : float
        The largest price at which any channel takes bits; 0 if none ever does.
    """
    top = largest * 1.01 if largest > 0 else 1.0
    return torch.logspace(np.log10(top * LOWEST_PRICE), np.log10(top), PRICES, dtype=torch.float64, device="cpu")


def rates_of_mean(curves: Tensor, target: float, weights: Tensor | None = None) -> Tensor:
    """Return each head's rate where the mean over heads is `target`, ``(heads,)`` float64.

    Rates are interpolated between neighbouring prices, so no rate falls where the target rises. Where even the lowest
    price leaves the mean below the target, the rest goes to all heads in proportion to what they have left.

    Parameters
    ----------
    curves : Tensor
        ``(heads, M)``, at ascending prices.
    target : float
        From 0 to the 8 bits that a channel can have; above, all heads get the same.
    weights : Tensor or None
        ``(heads,)``: how much each head counts in the mean, for instance its number of elements; None: all alike.

    Examples
    --------
    >>> rates_of_mean(torch.tensor([[4.0, 2.0, 0.0], [2.0, 0.0, 0.0]]), 2.0)
    tensor([3., 1.], dtype=torch.float64)
    """
    if target >= MOST_BITS:
        return torch.full((len(curves),), float(target), dtype=torch.float64, device="cpu")
    # Ascending rates; no bits at the one end and all at the other, whatever the prices reach.
    curves = curves.double().clamp(0, MOST_BITS).flip(-1)
    ends = torch.zeros_like(curves[:, :1]), torch.full_like(curves[:, :1], MOST_BITS)
    curves = torch.cat([ends[0], curves, ends[1]], -1)
    means = curves.mean(0) if weights is None else weights.double() @ curves / weights.sum()
    above = int(torch.searchsorted(means, target, right=True).clamp(1, len(means) - 1))
    below, gap = means[above - 1], means[above] - means[above - 1]
    part = (target - below) / gap if gap > 0 else 0.0
    return curves[:, above - 1] + part * (curves[:, above] - curves[:, above - 1])
