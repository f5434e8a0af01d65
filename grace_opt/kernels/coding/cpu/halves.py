"""Rounding to float16 in compiled loops, which have no numbers of that kind."""

from __future__ import annotations

import numpy as np

from ..._shared.jit import part
from ..._shared.memory import view
from ..reference import LARGEST

#: Below, float16 has fewer digits: a multiple of its smallest number.
LEAST_NORMAL = np.float32(2.0**-14)
#: Adding this to a smaller number, and taking it away, rounds to a multiple of float16's smallest number.
MAGIC = np.float32(0.75)
MOST = np.float32(LARGEST)
#: The bits that a float16 does not have of a float32, and half of their worth less one.
SPARE, HALF = np.int32(13), np.int32(0xFFF)


@part
def round_to_half(numbers):
    """Round to the nearest float16, ties to even; what is too large becomes the largest."""
    bits = view(numbers, np.int32)
    for i in range(numbers.shape[0]):
        x = min(max(numbers[i], -MOST), MOST)
        if abs(x) < LEAST_NORMAL:
            numbers[i] = (x + MAGIC) - MAGIC
        else:
            numbers[i] = x
            rounded = bits[i] + HALF + ((bits[i] >> SPARE) & np.int32(1))
            bits[i] = (rounded >> SPARE) << SPARE
