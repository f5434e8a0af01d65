"""Trellis codes of rows of numbers, compiled: Viterbi's algorithm for as many rows as a vector has lanes.

What is known of each column (the better of the two ways into each state, and the nearest level of each subset) is kept
in four bytes for the way back.

Source: as for :mod:`grace_opt.kernels.cache.coding.trellis`, which defines what is computed.
"""

from __future__ import annotations

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import (
    WIDEST,
    load_wholes,
    load_widest,
    smaller,
    spread_whole,
    spread_widest,
    store,
    transpose_widest,
    where_less,
)
from ...._shared.memory import empty, start_of
from ..reference import PER_BYTE
from ..trellis import STATES, SUBSETS

INFINITE, ZERO = np.float32(np.inf), np.float32(0.0)
#: Bytes of a number, and of a vector.
BYTES = 4
WHOLE = WIDEST * BYTES
#: Bits of what is kept of a column: those of the ways, and those of a level's place in its subset.
WAYS, PLACE = np.int32(STATES), np.int32(6)
#: Columns whose codes are made into bit planes at once.
COLUMNS = 32


@inlined
def search(columns, levels, fours, count, survivors):
    """Keep what is known of each column; return the best state at the end.

    Parameters
    ----------
    columns, survivors : int
        Addresses: of ``(count, WIDEST)`` float32, and int32.
    levels : int
        Address of ``(fours, SUBSETS, WIDEST)`` float32: each lane's, ascending, so that the subsets take turns;
        infinite where a lane has fewer.
    """
    infinite, zero, one = spread_widest(INFINITE), spread_widest(ZERO), spread_whole(np.int32(1))
    none, six = spread_whole(np.int32(0)), spread_whole(PLACE)
    # In units above the cost of state 0, so that they stay small.
    c1 = c2 = c3 = c4 = c5 = c6 = c7 = infinite
    for _ in range(count):
        x = load_widest(columns)
        e0 = e1 = e2 = e3 = infinite
        n0 = n1 = n2 = n3 = place = none
        level = levels
        for _ in range(fours):
            d0, d1 = x - load_widest(level), x - load_widest(level + WHOLE)
            d2, d3 = x - load_widest(level + 2 * WHOLE), x - load_widest(level + 3 * WHOLE)
            d0, d1, d2, d3 = d0 * d0, d1 * d1, d2 * d2, d3 * d3
            n0, n1 = where_less(d0, e0, place, n0), where_less(d1, e1, place, n1)
            n2, n3 = where_less(d2, e2, place, n2), where_less(d3, e3, place, n3)
            e0, e1, e2, e3 = smaller(e0, d0), smaller(e1, d1), smaller(e2, d2), smaller(e3, d3)
            place = place + one
            level += SUBSETS * WHOLE
        # The states before a state s are s // 2 and s // 2 + 4; which subset leads where, `trellis.subset` says.
        a0, b0, a1, b1 = e0, c4 + e2, e2, c4 + e0
        a2, b2, a3, b3 = c1 + e1, c5 + e3, c1 + e3, c5 + e1
        a4, b4, a5, b5 = c2 + e2, c6 + e0, c2 + e0, c6 + e2
        a6, b6, a7, b7 = c3 + e3, c7 + e1, c3 + e1, c7 + e3
        ways = where_less(b0, a0, one, none) | where_less(b1, a1, spread_whole(np.int32(2)), none)
        ways = ways | where_less(b2, a2, spread_whole(np.int32(4)), none)
        ways = ways | where_less(b3, a3, spread_whole(np.int32(8)), none)
        ways = ways | where_less(b4, a4, spread_whole(np.int32(16)), none)
        ways = ways | where_less(b5, a5, spread_whole(np.int32(32)), none)
        ways = ways | where_less(b6, a6, spread_whole(np.int32(64)), none)
        ways = ways | where_less(b7, a7, spread_whole(np.int32(128)), none)
        places = ((n3 << six | n2) << six | n1) << six | n0
        store(survivors, ways | places << spread_whole(WAYS))
        c0 = smaller(a0, b0)
        c1, c2, c3 = smaller(a1, b1) - c0, smaller(a2, b2) - c0, smaller(a3, b3) - c0
        c4, c5 = smaller(a4, b4) - c0, smaller(a5, b5) - c0
        c6, c7 = smaller(a6, b6) - c0, smaller(a7, b7) - c0
        columns += WHOLE
        survivors += WHOLE
    state, least = where_less(c1, zero, one, none), smaller(zero, c1)
    state, least = where_less(c2, least, spread_whole(np.int32(2)), state), smaller(least, c2)
    state, least = where_less(c3, least, spread_whole(np.int32(3)), state), smaller(least, c3)
    state, least = where_less(c4, least, spread_whole(np.int32(4)), state), smaller(least, c4)
    state, least = where_less(c5, least, spread_whole(np.int32(5)), state), smaller(least, c5)
    state, least = where_less(c6, least, spread_whole(np.int32(6)), state), smaller(least, c6)
    return where_less(c7, least, spread_whole(np.int32(7)), state)


@inlined
def walk_back(survivors, count, state, codes):
    """Write the codes of some columns, the last of which leads to a state; return the state before the first."""
    one, two = spread_whole(np.int32(1)), spread_whole(np.int32(2))
    ways, most = spread_whole(WAYS), spread_whole(np.int32((1 << PLACE) - 1))
    for t in range(count - 1, -1, -1):
        word = load_wholes(survivors + t * WHOLE)
        bit = state & one
        state = state >> one | (word >> state & one) << two
        subset = state & one | (bit ^ state >> one & one ^ state >> two) << one
        place = word >> ways + (subset << two) + (subset << one) & most
        store(codes + t * WHOLE, place << one | bit)
    return state


@inlined
def plane_of(codes, count, bit):
    """Return the bits of some columns' codes, the first column's lowest."""
    plane, shift, one = spread_whole(np.int32(0)), spread_whole(np.int32(bit)), spread_whole(np.int32(1))
    for t in range(count - 1, -1, -1):
        plane = plane << one | load_wholes(codes + t * WHOLE) >> shift & one
    return plane


@inlined(error_model="numpy")
def code_by_trellis(scaled, count, rows, widths, trellis, planes, starts):
    """Write the planes of some rows, no more than lanes.

    Parameters
    ----------
    scaled : (WIDEST, n) float32
        Divided by their scales, in `count` columns, n being the next multiple of WIDEST; other numbers may be any.
    count : int
    rows : (L,) int64
    widths : (R,) uint8
    trellis : (M, 256) float32
        Row b has the levels of codes that are read as b bits.
    planes : (P,) uint8
    starts : (R,) int64
        Where in `planes` those of each row begin.
    """
    size, most = (count + PER_BYTE - 1) // PER_BYTE, np.int64(0)
    for row in rows:
        most = max(most, np.int64(widths[row]))
    levels = empty((2 << most, WIDEST), np.float32)
    for code in range(2 << most):
        for lane in range(WIDEST):
            own = widths[rows[min(lane, rows.shape[0] - 1)]]
            levels[code, lane] = trellis[own + 1, code] if code < 2 << own else INFINITE
    columns, places = empty((scaled.shape[1], WIDEST), np.float32), empty((WIDEST,), np.int64)
    for lane in range(WIDEST):
        places[lane] = start_of(scaled[lane])
    for offset in range(0, scaled.shape[1] * BYTES, WHOLE):
        transpose_widest(start_of(places), offset, start_of(columns) + offset * WIDEST, WHOLE)
    survivors = empty((count, WIDEST), np.int32)
    state = search(start_of(columns), start_of(levels), (2 << most) // SUBSETS, count, start_of(survivors))
    codes, words = empty((COLUMNS, WIDEST), np.int32), empty((WIDEST,), np.int32)
    for first in range((count - 1) // COLUMNS * COLUMNS, -1, -COLUMNS):
        number = min(COLUMNS, count - first)
        state = walk_back(start_of(survivors) + first * WHOLE, number, state, start_of(codes))
        for bit in range(most):
            store(start_of(words), plane_of(start_of(codes), number, bit))
            for lane in range(rows.shape[0]):
                if bit < widths[rows[lane]]:
                    offset = starts[rows[lane]] + bit * size + first // PER_BYTE
                    for byte in range((number + PER_BYTE - 1) // PER_BYTE):
                        planes[offset + byte] = words[lane] >> (byte * PER_BYTE) & 0xFF
