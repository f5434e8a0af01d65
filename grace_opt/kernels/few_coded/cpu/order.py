"""Where the tokens of a sequence lie: their classes, which are stored, say how many of each came before."""

from __future__ import annotations

import numpy as np

from ..._shared.jit import part
from ..._shared.lanes import load_byte
from ..._shared.memory import zeros
from ..forms import BITS, HEAD_STEP, IN_SEGMENT, PLACES_OF, SECOND


@part
def places_in_order(segments, first, last, h, places):
    """Write the place of each token of a head, in the order of the sequence."""
    found, free = 0, zeros((4,), np.int64)
    for number in range(first, last):
        one = segments[number]
        low = one[BITS] + h * one[HEAD_STEP]
        high = low + one[SECOND]
        for number_of_class in range(4):
            free[number_of_class] = one[PLACES_OF + number_of_class]
        for t in range(0, one[IN_SEGMENT], 8):
            x, y = np.int64(load_byte(low + t // 8)), np.int64(load_byte(high + t // 8))
            for bit in range(min(8, one[IN_SEGMENT] - t)):
                number_of_class = (x >> bit & 1) | (y >> bit & 1) << 1
                places[found] = free[number_of_class]
                free[number_of_class] += 1
                found += 1
