"""Trellis codes of rows of numbers, compiled: the nearest levels in vectors, and Viterbi's algorithm in registers.

Source: as for :mod:`grace_opt.kernels.coding.trellis`, which defines what is computed.
"""

from __future__ import annotations

import numpy as np

from ..._shared.jit import part
from ..._shared.memory import empty
from ..trellis import SUBSETS

INFINITE = np.float32(np.inf)


@part(error_model="numpy")
def nearest_of_subsets(scaled, levels, bits, errors, nearest):
    """Write, of each subset of the levels, the one nearest to each number, and the squared error."""
    count = scaled.shape[0]
    for s in range(SUBSETS):
        for t in range(count):
            errors[s, t], nearest[s, t] = INFINITE, 0
    for code in range(2 << bits):
        level, own, found, number = levels[code], errors[code % SUBSETS], nearest[code % SUBSETS], np.uint8(code)
        for t in range(count):
            error = (scaled[t] - level) * (scaled[t] - level)
            closer = error < own[t]
            own[t] = error if closer else own[t]
            found[t] = number if closer else found[t]


@part(error_model="numpy")
def search(errors, count, ways):
    """Write, for each column and state, whether the second of the two states before is the better one, as a bit; return
    the best state at the end."""
    infinite = np.float64(np.inf)
    c0, c1, c2, c3, c4, c5, c6, c7 = 0.0, infinite, infinite, infinite, infinite, infinite, infinite, infinite
    for t in range(count):
        e0, e1 = np.float64(errors[0, t]), np.float64(errors[1, t])
        e2, e3 = np.float64(errors[2, t]), np.float64(errors[3, t])
        a0, b0 = c0 + e0, c4 + e2
        a1, b1 = c0 + e2, c4 + e0
        a2, b2 = c1 + e1, c5 + e3
        a3, b3 = c1 + e3, c5 + e1
        a4, b4 = c2 + e2, c6 + e0
        a5, b5 = c2 + e0, c6 + e2
        a6, b6 = c3 + e3, c7 + e1
        a7, b7 = c3 + e1, c7 + e3
        way = np.uint8(b0 < a0) | np.uint8(b1 < a1) << 1 | np.uint8(b2 < a2) << 2 | np.uint8(b3 < a3) << 3
        way |= np.uint8(b4 < a4) << 4 | np.uint8(b5 < a5) << 5 | np.uint8(b6 < a6) << 6 | np.uint8(b7 < a7) << 7
        ways[t] = way
        c0, c1 = (b0 if b0 < a0 else a0), (b1 if b1 < a1 else a1)
        c2, c3 = (b2 if b2 < a2 else a2), (b3 if b3 < a3 else a3)
        c4, c5 = (b4 if b4 < a4 else a4), (b5 if b5 < a5 else a5)
        c6, c7 = (b6 if b6 < a6 else a6), (b7 if b7 < a7 else a7)
    state, least = 0, c0
    for other, cost in ((1, c1), (2, c2), (3, c3), (4, c4), (5, c5), (6, c6), (7, c7)):
        if cost < least:
            state, least = other, cost
    return state


@part(error_model="numpy")
def walk_back(nearest, ways, state, codes):
    """Write the codes that lead to a state."""
    for back in range(codes.shape[0]):
        t = codes.shape[0] - 1 - back
        bit = state & 1
        state = (state >> 1) | ((np.int64(ways[t]) >> state) & 1) << 2
        level = np.int64(nearest[(state & 1) | (bit ^ (state >> 1 & 1) ^ (state >> 2)) << 1, t])
        codes[t] = np.uint8(level >> 2 << 1 | bit)


@part(error_model="numpy")
def weave(scaled, levels, bits, codes):
    """Write a row's codes: see `grace_opt.kernels.coding.trellis.searched`."""
    count = scaled.shape[0]
    errors, nearest = empty((SUBSETS, count), np.float32), empty((SUBSETS, count), np.uint8)
    ways = empty((count,), np.uint8)
    nearest_of_subsets(scaled, levels, bits, errors, nearest)
    walk_back(nearest, ways, search(errors, count, ways), codes)
