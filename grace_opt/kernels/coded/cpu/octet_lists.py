"""Which planes are read together: octets of a unit's keys, or values, in the order in which they are read.

First, for keys, planes of channels of one and two bits, whose numbers are sums over their bits: a plane is a weight,
added or taken away. Then two channels of up to four bits each. Then one channel of five, six, eight or seven bits.
Planes that an octet lacks are some that it has, with numbers that take no account of them: nothing else is read.

When: :mod:`grace_opt.kernels.coded.cpu.octet_loops`.
"""

from __future__ import annotations

import numpy as np

from ..._shared.jit import part
from ..._shared.lanes import WIDEST, load_one, load_place, store_one
from ..._shared.memory import empty, start_of
from ...decode.cpu import ZERO
from ..forms import ROWS
from .channels import ALL, READ_BITS
from .octets import (
    ENTRY,
    HALF,
    LINE,
    LONGER,
    PLACE,
    PLANES,
    TABLES,
    WHOLE,
    ask_for_line,
    make_octet,
    put_planes,
    store_sums_of_signs,
    store_tables,
)

#: Bytes of a float32; place among `READ_BITS` of the last width of which two channels make an octet; kinds of octets.
BYTES, LAST_OF_TWO, KINDS = 4, READ_BITS.index(HALF), 6
#: Tables that `store_tables` writes: zeros, and ones.
NO_NUMBERS, ONES, COUNT_OF_TABLES = 0, 5, 6
#: How often the tokens that octets are made of at once are sixty-four.
AT_ONCE = LINE // PLACE
#: `LONGER` of octets of weights, of two channels and of one.
OF_WEIGHTS, OF_TWO, OF_ONE = 0b1111, 0b0101, 0b0001
#: Place among `READ_BITS` of eight bits, which no code of a trellis has.
EIGHT_BITS = READ_BITS.index(8)


@part
def make_octets(width):
    """Room for the octets of as many channels: what is said of each; vectors of its queries or totals, `ROWS` for each
    half; where the octets of each kind end; weights of planes; tables of four bits; the octets' bytes; the address
    of what is asked for next, and the one behind what is read of its plane."""
    count = width + 2
    return (
        empty((count, ENTRY), np.int64),
        empty((count, 2 * ROWS * WIDEST), np.float32),
        empty((KINDS,), np.int64),
        empty((ROWS, 2 * width + PLANES), np.float32),
        empty((COUNT_OF_TABLES, WIDEST), np.float32),
        empty((AT_ONCE * count, WIDEST), np.float32),
        empty((2,), np.int64),
    )


@part
def make_some(octets, first, last, at, size):
    """Write the bytes of the octets from `first` on, those of the same sixty-four tokens side by side.

    They are made of `size` bytes from a place of each plane on. Returns where they begin, and how many bytes it is from
    sixty-four tokens to the next ones.
    """
    entries, to, step = octets[0], start_of(octets[5]), (last - first) * LINE
    for i in range(first, last):
        make_octet(start_of(entries[i]), at, size, to + (i - first) * LINE, step)
    return to, step


@part
def begin_to_ask(octets, coming):
    """Ask for nothing yet of what is read afterwards: its address, the bytes, a plane's bytes."""
    octets[6][0], octets[6][1] = coming[0], coming[0] + coming[1]


@part
def ask(octets, coming, count):
    """Ask for some lines of what is read afterwards, plane by plane; a processor can wait for about a dozen."""
    asked = octets[6]
    place, end = asked[0], asked[1]
    if coming[1] > 0:
        for _ in range(count):
            ask_for_line(place)
            place += LINE
            if place >= end:
                place, end = end - coming[1] + coming[2], end + coming[2]
    asked[0], asked[1] = place, end


@part
def list_signs(places, starts, step, books, book_step, queries, query_step, rows, octets, trellis):
    """List the planes of channels of one and two bits; return how many octets they make."""
    entries, factors, _, weights, tables, _, _ = octets
    planes = 0
    for width in range(1, 3):
        book = books + width * book_step
        for i in range(starts[width], starts[width + 1]):
            for plane in range(width):
                half = (load_one(book + (1 << plane) * BYTES) - load_one(book)) * np.float32(0.5)
                place = load_place(places + i * PLACE) + max(plane - trellis, 0) * step
                entries[planes // PLANES, planes % PLANES] = place
                for row in range(rows):
                    weights[row, planes] = load_one(queries + row * query_step + i * BYTES) * half
                planes += 1
    count = (planes + PLANES - 1) // PLANES
    for place in range(planes, count * PLANES):
        entries[count - 1, place % PLANES] = entries[count - 1, 0]
        for row in range(rows):
            weights[row, place] = ZERO
    for octet in range(count):
        entries[octet, TABLES], entries[octet, LONGER] = start_of(tables[ONES]), trellis * OF_WEIGHTS
        to = start_of(factors) + octet * 2 * rows * WHOLE
        for half in range(2):
            for row in range(rows):
                given = start_of(weights[row]) + (octet * PLANES + half * HALF) * BYTES
                store_sums_of_signs(given, to + (row + half * rows) * WHOLE)
    return count


@part
def list_channels(places, starts, step, books, book_step, first, count, octets, trellis):
    """List channels from the first one of a width on, behind `count` octets; write where each kind of them ends."""
    entries, _, ends, _, tables, _, _ = octets
    ends[0] = count
    half = starts[0]
    for width in range(first, HALF + 1):
        for i in range(starts[width], starts[width + 1]):
            to = start_of(entries[count]) + half * HALF * PLACE
            put_planes(to, load_place(places + i * PLACE), step, width, trellis)
            entries[count, TABLES + half], entries[count, LONGER] = start_of(tables[width]), trellis * OF_TWO
            count, half = count + half, 1 - half
    if half:  # the last octet's other half
        for place in range(HALF, PLANES):
            entries[count, place] = entries[count, 0]
        entries[count, TABLES + 1] = start_of(tables[NO_NUMBERS])
        count += 1
    ends[1] = count
    for kind in range(2, KINDS):
        level = LAST_OF_TWO + kind - 1
        longer = trellis if level != EIGHT_BITS else trellis * 0
        for i in range(starts[level], starts[level + 1]):
            to, place = start_of(entries[count]), load_place(places + i * PLACE)
            put_planes(to, place, step, count * 0 + HALF, longer)
            put_planes(to + HALF * PLACE, place + (HALF - longer) * step, step, READ_BITS[level] - HALF, trellis * 0)
            entries[count, TABLES], entries[count, LONGER] = books + READ_BITS[level] * book_step, longer * OF_ONE
            count += 1
        ends[kind] = count


@part
def list_keys(places, starts, step, books, book_step, queries, query_step, rows, octets, trellis):
    """List the octets of keys, and write the numbers that each of their bytes is multiplied with, or looked up in."""
    factors, tables = octets[1], octets[4]
    store_tables(books, book_step, start_of(tables))
    signs = list_signs(places, starts, step, books, book_step, queries, query_step, rows, octets, trellis)
    list_channels(places, starts, step, books, book_step, starts[0] + 3, signs, octets, trellis)
    to, last = start_of(factors) + signs * 2 * rows * WHOLE, starts[LAST_OF_TWO + 1] - 1
    for i in range(starts[3], last + 1, 2):
        for channel in range(i, i + 2):
            for row in range(rows):
                query = load_one(queries + row * query_step + min(channel, last) * BYTES)
                store_one(to, query)
                to += BYTES
    for i in range(last + 1, starts[ALL]):
        for row in range(rows):
            query = load_one(queries + row * query_step + i * BYTES)
            store_one(to + row * BYTES, query)
        to += 2 * rows * BYTES


@part
def list_values(places, starts, step, books, book_step, octets, trellis):
    """List the octets of values."""
    store_tables(books, book_step, start_of(octets[4]))
    list_channels(places, starts, step, books, book_step, starts[0] + 1, starts[0], octets, trellis)
