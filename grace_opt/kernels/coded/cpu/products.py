"""Products of four rows with numbers of a few bits: logits from keys, sums from values; one loop for each width.

Each loop takes channels of one width and thirty-two tokens at a time: their codes are turned into numbers once, for all
four rows, and the sums stay in registers. A loop's body is one instruction to numba, whose own work on many small ones
would take longer than LLVM's.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..._shared.jit import part
from ..._shared.lanes import (
    WIDEST,
    load_one,
    load_place,
    multiply_add_vectors,
    spread_widest,
    store_one,
    total,
    widest,
)
from ..._shared.lanes import store as store_vector
from ..forms import ROWS, WIDTHS
from .levels import STEP, number_at, reading, vector_at

#: Bytes of a float32, of an int64 and of a vector; tokens of two vectors, and the bytes of their bits in a plane.
BYTES, PLACE, WHOLE = 4, 8, 4 * WIDEST
PAIR, PAIR_STEP = 2 * WIDEST, 2 * STEP
NOTHING = np.float32(0.0)
#: Sums in registers: of each row with the first vector's tokens, then of each with the second's.
SUMS = types.UniTuple(widest, 2 * ROWS)


def adding(width, factors, **how):
    """Return a function that adds to the sums the products of thirty-two numbers of some bits, which it reads, with the
    rows' factors: (address of their first plane's bits, bytes to the next plane, address of the numbers that codes
    stand for, address of the first row's factors, bytes to the next row's, sums). `how` as for `reading`."""
    read = reading(width, **how)

    @intrinsic
    def add(typing_context, at, step, table, given, given_step, sums):
        def generate(context, builder, signature, arguments):
            at, step, table, given, given_step, sums = arguments
            second = builder.add(at, ir.Constant(at.type, STEP))
            numbers = read(builder, at, step, table), read(builder, second, step, table)
            for row in range(ROWS):
                for place, (number, factor) in enumerate(zip(numbers, factors(builder, given), strict=True)):
                    found = builder.extract_value(sums, row + place * ROWS)
                    sums = builder.insert_value(
                        sums, multiply_add_vectors(builder, factor, number, found), row + place * ROWS
                    )
                given = builder.add(given, given_step)
            return sums

        return SUMS(types.intp, types.intp, types.intp, types.intp, types.intp, SUMS), generate

    return add


def of_channel(builder, address):
    """The query's entry, for the tokens of both vectors."""
    factor = number_at(builder, address)
    return factor, factor


def _of_tokens(builder, address):
    """The tokens' shares."""
    return vector_at(builder, address), vector_at(builder, address, 1)


_keys1, _keys2, _keys3, _keys4, _keys5, _keys6, _keys8 = (adding(width, of_channel) for width in WIDTHS[1:])
_values1, _values2, _values3, _values4, _values5, _values6, _values8 = (
    adding(width, _of_tokens) for width in WIDTHS[1:]
)


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
        for i in range(starts[1], starts[2]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _keys1(place, step, books + 1 * book_step, query, query_step, sums)
        for i in range(starts[2], starts[3]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _keys2(place, step, books + 2 * book_step, query, query_step, sums)
        for i in range(starts[3], starts[4]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _keys3(place, step, books + 3 * book_step, query, query_step, sums)
        for i in range(starts[4], starts[5]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _keys4(place, step, books + 4 * book_step, query, query_step, sums)
        for i in range(starts[5], starts[6]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _keys5(place, step, books + 5 * book_step, query, query_step, sums)
        for i in range(starts[6], starts[7]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _keys6(place, step, books + 6 * book_step, query, query_step, sums)
        for i in range(starts[7], starts[8]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _keys8(place, step, books + 8 * book_step, query, query_step, sums)
        place = out + t * BYTES
        for row in range(4):
            store_vector(place + row * out_step, sums[row])
            store_vector(place + row * out_step + WHOLE, sums[row + 4])


@part
def add_totals(found, sums):
    """Add what the lanes of each row's two vectors sum up to, to four numbers from an address on."""
    for row in range(ROWS):
        place = sums + row * BYTES
        store_one(place, load_one(place) + total(found[row] + found[row + ROWS]))


@part
def add_values(places, starts, offset, step, count, shares, share_step, books, book_step, sums):
    """Add to four sums per channel the shares of four rows times `count` numbers, a multiple of `PAIR`.

    Parameters as for `add_logits`; `sums` is the address of four numbers for each channel, in the order of widths.
    """
    zero = spread_widest(NOTHING)
    none = zero, zero, zero, zero, zero, zero, zero, zero
    for i in range(starts[1], starts[2]):
        place, share, found = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, PAIR):
            found = _values1(place, step, books + 1 * book_step, share, share_step, found)
            place, share = place + PAIR_STEP, share + 2 * WHOLE
        add_totals(found, sums + ROWS * i * BYTES)
    for i in range(starts[2], starts[3]):
        place, share, found = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, PAIR):
            found = _values2(place, step, books + 2 * book_step, share, share_step, found)
            place, share = place + PAIR_STEP, share + 2 * WHOLE
        add_totals(found, sums + ROWS * i * BYTES)
    for i in range(starts[3], starts[4]):
        place, share, found = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, PAIR):
            found = _values3(place, step, books + 3 * book_step, share, share_step, found)
            place, share = place + PAIR_STEP, share + 2 * WHOLE
        add_totals(found, sums + ROWS * i * BYTES)
    for i in range(starts[4], starts[5]):
        place, share, found = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, PAIR):
            found = _values4(place, step, books + 4 * book_step, share, share_step, found)
            place, share = place + PAIR_STEP, share + 2 * WHOLE
        add_totals(found, sums + ROWS * i * BYTES)
    for i in range(starts[5], starts[6]):
        place, share, found = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, PAIR):
            found = _values5(place, step, books + 5 * book_step, share, share_step, found)
            place, share = place + PAIR_STEP, share + 2 * WHOLE
        add_totals(found, sums + ROWS * i * BYTES)
    for i in range(starts[6], starts[7]):
        place, share, found = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, PAIR):
            found = _values6(place, step, books + 6 * book_step, share, share_step, found)
            place, share = place + PAIR_STEP, share + 2 * WHOLE
        add_totals(found, sums + ROWS * i * BYTES)
    for i in range(starts[7], starts[8]):
        place, share, found = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, PAIR):
            found = _values8(place, step, books + 8 * book_step, share, share_step, found)
            place, share = place + PAIR_STEP, share + 2 * WHOLE
        add_totals(found, sums + ROWS * i * BYTES)
