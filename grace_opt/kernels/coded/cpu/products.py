"""Products of four rows with numbers of a few bits: logits from keys, sums from values; one loop for each width.

Each loop takes channels of one width and thirty-two tokens at a time: their codes are turned into numbers once, for all
four rows, and the sums stay in registers.
"""

from __future__ import annotations

import numpy as np

from ..._shared.jit import part
from ..._shared.lanes import WIDEST, load_one, load_place, load_widest, multiply_add, spread_widest, store_one, total
from ..._shared.lanes import store as store_vector
from ..forms import WIDTHS
from .levels import STEP, reading

#: Bytes of a float32, of an int64 and of a vector; tokens of two vectors, and the bytes of their bits in a plane.
BYTES, PLACE, WHOLE = 4, 8, 4 * WIDEST
PAIR, PAIR_STEP = 2 * WIDEST, 2 * STEP
NOTHING = np.float32(0.0)


def _logits_of(width):
    read = reading(width)

    @part
    def add(places, first, last, offset, step, queries, query_step, table, sums):
        a0, a1, a2, a3, b0, b1, b2, b3 = sums
        for i in range(first, last):
            at, query = load_place(places + i * PLACE) + offset, queries + i * BYTES
            x, y = read(at, step, table), read(at + STEP, step, table)
            q = spread_widest(load_one(query))
            a0, b0 = multiply_add(q, x, a0), multiply_add(q, y, b0)
            q = spread_widest(load_one(query + query_step))
            a1, b1 = multiply_add(q, x, a1), multiply_add(q, y, b1)
            q = spread_widest(load_one(query + 2 * query_step))
            a2, b2 = multiply_add(q, x, a2), multiply_add(q, y, b2)
            q = spread_widest(load_one(query + 3 * query_step))
            a3, b3 = multiply_add(q, x, a3), multiply_add(q, y, b3)
        return a0, a1, a2, a3, b0, b1, b2, b3

    return add


def _values_of(width):
    read = reading(width)

    @part
    def add(places, first, last, offset, step, count, shares, share_step, table, sums):
        for i in range(first, last):
            at, share = load_place(places + i * PLACE) + offset, shares
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread_widest(NOTHING)
            for _ in range(0, count, PAIR):
                x, y = read(at, step, table), read(at + STEP, step, table)
                a0 = multiply_add(load_widest(share), x, a0)
                b0 = multiply_add(load_widest(share + WHOLE), y, b0)
                a1 = multiply_add(load_widest(share + share_step), x, a1)
                b1 = multiply_add(load_widest(share + share_step + WHOLE), y, b1)
                a2 = multiply_add(load_widest(share + 2 * share_step), x, a2)
                b2 = multiply_add(load_widest(share + 2 * share_step + WHOLE), y, b2)
                a3 = multiply_add(load_widest(share + 3 * share_step), x, a3)
                b3 = multiply_add(load_widest(share + 3 * share_step + WHOLE), y, b3)
                at, share = at + PAIR_STEP, share + 2 * WHOLE
            place = sums + 4 * i * BYTES
            store_one(place, load_one(place) + total(a0 + b0))
            store_one(place + BYTES, load_one(place + BYTES) + total(a1 + b1))
            store_one(place + 2 * BYTES, load_one(place + 2 * BYTES) + total(a2 + b2))
            store_one(place + 3 * BYTES, load_one(place + 3 * BYTES) + total(a3 + b3))

    return add


_logits1, _logits2, _logits3, _logits4, _logits5, _logits6, _logits8 = (_logits_of(width) for width in WIDTHS[1:])
_values1, _values2, _values3, _values4, _values5, _values6, _values8 = (_values_of(width) for width in WIDTHS[1:])


@part
def add_logits(places, starts, offset, step, count, queries, query_step, constants, books, book_step, out, out_step):
    """Write the logits of four rows with `count` keys, a multiple of `PAIR`: their constants, and products with codes.

    `places` has the address of each channel's first plane, channels in the order of their widths, of which width number
    w has those from ``starts[w]`` to ``starts[w + 1]``; `offset` is that of the first token, `step` that of the next
    plane. `queries` are in the same order; `books` has a row of numbers for each width.
    """
    for t in range(0, count, PAIR):
        sums = (
            spread_widest(constants[0]),
            spread_widest(constants[1]),
            spread_widest(constants[2]),
            spread_widest(constants[3]),
            spread_widest(constants[0]),
            spread_widest(constants[1]),
            spread_widest(constants[2]),
            spread_widest(constants[3]),
        )
        at = offset + t // 8
        sums = _logits1(places, starts[1], starts[2], at, step, queries, query_step, books + 1 * book_step, sums)
        sums = _logits2(places, starts[2], starts[3], at, step, queries, query_step, books + 2 * book_step, sums)
        sums = _logits3(places, starts[3], starts[4], at, step, queries, query_step, books + 3 * book_step, sums)
        sums = _logits4(places, starts[4], starts[5], at, step, queries, query_step, books + 4 * book_step, sums)
        sums = _logits5(places, starts[5], starts[6], at, step, queries, query_step, books + 5 * book_step, sums)
        sums = _logits6(places, starts[6], starts[7], at, step, queries, query_step, books + 6 * book_step, sums)
        sums = _logits8(places, starts[7], starts[8], at, step, queries, query_step, books + 8 * book_step, sums)
        place = out + t * BYTES
        for row in range(4):
            store_vector(place + row * out_step, sums[row])
            store_vector(place + row * out_step + WHOLE, sums[row + 4])


@part
def add_values(places, starts, offset, step, count, shares, share_step, books, book_step, sums):
    """Add to four sums per channel the shares of four rows times `count` numbers, a multiple of `PAIR`.

    Parameters as for `add_logits`; `sums` is the address of four numbers for each channel, in the order of widths.
    """
    _values1(places, starts[1], starts[2], offset, step, count, shares, share_step, books + 1 * book_step, sums)
    _values2(places, starts[2], starts[3], offset, step, count, shares, share_step, books + 2 * book_step, sums)
    _values3(places, starts[3], starts[4], offset, step, count, shares, share_step, books + 3 * book_step, sums)
    _values4(places, starts[4], starts[5], offset, step, count, shares, share_step, books + 4 * book_step, sums)
    _values5(places, starts[5], starts[6], offset, step, count, shares, share_step, books + 5 * book_step, sums)
    _values6(places, starts[6], starts[7], offset, step, count, shares, share_step, books + 6 * book_step, sums)
    _values8(places, starts[7], starts[8], offset, step, count, shares, share_step, books + 8 * book_step, sums)
