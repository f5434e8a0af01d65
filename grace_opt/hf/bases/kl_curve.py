r"""A measured curve: the KL divergence that each number of bits leaves, and the fewest bits that keep one.

Between the points that were measured, :math:`\ln \mathrm{KL}` is a straight line in bits: each bit divides a squared
error by about four.

When: ``max_kl=``, which asks for an error and not for bits; and ``report.predicted_kl``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ...errors import OptionError

#: Bits per element at which a curve is measured.
POINTS = (1.0, 1.5, 2.25, 3.0, 4.0)
#: Below, a KL divergence of float64 probabilities is rounding.
LEAST = 1e-12


def curve_of(points: Sequence[float], kl: Sequence[float]) -> Tensor:
    """Return the curve ``(M, 2)`` float64 of bits, ascending, and their KL, which never rises.

    Where rounding of the model's own numbers is all that is left, a measurement may rise: it counts as the one before.
    """
    least, found = math.inf, []
    for bits, measured in zip(points, kl, strict=True):
        least = min(least, max(measured, LEAST))
        found.append((bits, least))
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def kl_of_bits(curve: Tensor, bits: float) -> float:
    """Return the KL at so many bits, nats per token; beyond the ends of the curve, that of its end.

    Examples
    --------
    >>> curve = curve_of([1.0, 3.0], [0.01, 0.0001])
    >>> [round(kl_of_bits(curve, bits), 6) for bits in (0.5, 2, 3, 8)]
    [0.01, 0.001, 0.0001, 0.0001]
    """
    rows = curve.tolist()
    for (low, high), (after, least) in pairwise(rows):
        if bits <= after:
            part = max(bits - low, 0.0) / (after - low)
            return math.exp((1 - part) * math.log(high) + part * math.log(least))
    return float(rows[-1][1])


def bits_of_kl(curve: Tensor, kl: float) -> float:
    """Return the fewest bits that leave no more than a KL; not fewer than the curve begins with.

    Raises
    ------
    OptionError
        If no measured number of bits leaves so little.

    Examples
    --------
    >>> curve = curve_of([1.0, 3.0], [0.01, 0.0001])
    >>> [round(bits_of_kl(curve, kl), 6) for kl in (0.5, 0.001, 0.0001)]
    [1.0, 2.0, 3.0]
    """
    rows = curve.tolist()
    if kl < rows[-1][1]:
        most, least = rows[-1]
        raise OptionError(
            f"max_kl={kl:g}: the most bits that were measured, {most:g}, leave a KL of {least:.2g} on this model; "
            f"write max_kl={math.ceil(least * 1e5) / 1e5:g} or more, or ask for bits, such as bits=6"
        )
    if kl >= rows[0][1]:
        return float(rows[0][0])
    for (low, high), (after, least) in pairwise(rows):
        if kl >= least:
            return float(low + (after - low) * (math.log(high) - math.log(kl)) / (math.log(high) - math.log(least)))
    raise AssertionError("a curve ends with its least KL")
