"""The planes that are read together: octets of a unit's keys, or values, in the order in which they are read.

First, for keys and registers of sixteen numbers, planes of channels of one and two bits, whose numbers are sums over
their bits: a plane is a weight, added or taken away. Registers of eight have two channels of up to three bits in their
place. Then two channels of up to four bits each, then one channel of five, six, eight or seven bits. Planes that an
octet lacks are some that it has, with numbers that take no account of them: nothing else is read.

When: :mod:`grace_opt.kernels.cache.coded.cpu.octet_loops`.
"""

from __future__ import annotations

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import WIDEST, load_byte, load_one, load_place, store_one
from ...._shared.memory import empty, start_of
from ...decode.cpu import ZERO
from ..forms import ROWS
from .channels import ALL, CACHE_LINE, READ_BITS
from .octet_bytes import ENTRY, HALF, LINE, LONGER, PLACE, PLANES, TABLES, leaves_page, make_octet, put_planes
from .octets import BYTES, FEW, SIXTEEN, WHOLE, prefetch_line, store_sums_of_signs, store_tables

#: Whether planes are weights that are added up; kinds of octets.
WEIGHTS, KINDS = WIDEST == SIXTEEN, 6
#: Places among `READ_BITS` of the last widths of which two channels make an octet: of the second kind, and of all that
#: come before it, which are of the first one if planes are no weights.
LAST_OF_TWO, LAST_OF_FEW = READ_BITS.index(HALF), 0 if WEIGHTS else READ_BITS.index(FEW)
#: Tables that `store_tables` writes: zeros, and ones.
NO_NUMBERS, ONES, COUNT_OF_TABLES = 0, 5, 6
#: Lines of tokens' bytes that are made at once.
AT_ONCE = 8
#: `LONGER` of octets of weights, of two channels and of one.
OF_WEIGHTS, OF_TWO, OF_ONE = 0b1111, 0b0101, 0b0001
#: Place among `READ_BITS` of eight bits, which no code of a trellis has.
EIGHT_BITS = READ_BITS.index(8)


@inlined
def make_octets(width):
    """Return the workspace for the octets of as many channels: what is said of each; vectors of its queries or totals,
    `ROWS` for each half; where the octets of each kind end; weights of planes; tables of four bits; the octets' bytes;
    the address of what is prefetched next, and the one behind what is read of its plane; a copy of planes, each with a
    byte before it, and what is said of them."""
    count = width + 2
    return (
        empty((count, ENTRY), np.int64),
        empty((count, 2 * ROWS * WIDEST), np.float32),
        empty((KINDS,), np.int64),
        empty((ROWS, 2 * width + PLANES), np.float32),
        empty((COUNT_OF_TABLES, SIXTEEN), np.float32),
        empty((AT_ONCE * count, WIDEST), np.float32),
        empty((2,), np.int64),
        empty((PLANES, 2 * LINE), np.uint8),
        empty((ENTRY,), np.int64),
    )


@inlined
def make_some(octets, first, last, offset, size):
    """Write the bytes of the octets from `first` on, those of the same line of tokens side by side.

    They are made of `size` bytes from a place of each plane on. Returns where they begin, and how many bytes it is from
    a line to the next one. Where whole lines are read, and memory may end within one, it is copied first.
    """
    entries, to, step = octets[0], start_of(octets[5]), (last - first) * LINE
    for i in range(first, last):
        octet, place = start_of(entries[i]), offset
        if WIDEST < SIXTEEN and size < LINE and leaves_page(octet, offset):
            copied, place = octets[8], offset * 0 + 1
            copy_planes(octet, offset, size, octets[7], copied)
            octet = start_of(copied)
        make_octet(octet, place, size, to + (i - first) * LINE, step)
    return to, step


@inlined
def copy_planes(octet, offset, size, copies, copied):
    """Copy `size` bytes of each plane, and the one before them, or 0; write what is said of the copies."""
    for place in range(PLANES, ENTRY):
        copied[place] = load_place(octet + place * PLACE)
    for plane in range(PLANES):
        source = load_place(octet + plane * PLACE) + offset
        copies[plane, 0] = load_byte(source - 1) if offset > 0 else np.uint8(offset)
        for byte in range(size):
            copies[plane, 1 + byte] = load_byte(source + byte)
        copied[plane] = start_of(copies[plane])


@inlined
def begin_to_prefetch(octets, upcoming):
    """Note what is read afterwards, and is prefetched from now on: its address, the bytes read, a plane's bytes."""
    octets[6][0], octets[6][1] = upcoming[0], upcoming[0] + upcoming[1]


@inlined
def prefetch(octets, upcoming, count):
    """Prefetch some lines of what is read afterwards, plane by plane; a processor can wait for about a dozen."""
    prefetched = octets[6]
    place, end = prefetched[0], prefetched[1]
    if upcoming[1] > 0:
        for _ in range(count):
            prefetch_line(place)
            place += CACHE_LINE
            if place >= end:
                place, end = end - upcoming[1] + upcoming[2], end + upcoming[2]
    prefetched[0], prefetched[1] = place, end


@inlined
def list_signs(places, starts, step, books, book_step, queries, query_step, rows, octets, trellis):
    """List the planes of channels of one and two bits; return how many octets they make."""
    entries, factors, _, weights, tables = octets[:5]
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
                source = start_of(weights[row]) + (octet * PLANES + half * HALF) * BYTES
                store_sums_of_signs(source, to + (row + half * rows) * WHOLE)
    return count


@inlined
def list_pairs(places, starts, step, first, last, octets, count, trellis):
    """List channels of some widths, two in an octet, behind `count` octets; return how many there are then."""
    entries, tables = octets[0], octets[4]
    half = starts[0]
    for width in range(first, last + 1):
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
    return count


@inlined
def list_channels(places, starts, step, books, book_step, first, count, octets, trellis):
    """List channels from the first one of a width on, behind `count` octets; write where each kind of them ends."""
    entries, ends = octets[0], octets[2]
    sources, last = (places, starts, step), first * 0 + LAST_OF_TWO
    if LAST_OF_FEW:
        few = first * 0 + LAST_OF_FEW
        count = list_pairs(*sources, first, few, octets, count, trellis)
        first = few + 1
    ends[0] = count
    count = list_pairs(*sources, first, last, octets, count, trellis)
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


@inlined
def put_queries(queries, query_step, rows, first, stop, to):
    """Write the queries of channels, two in an octet; return where the next ones belong."""
    for i in range(first, stop, 2):
        for channel in range(i, i + 2):
            for row in range(rows):
                store_one(to, load_one(queries + row * query_step + min(channel, stop - 1) * BYTES))
                to += BYTES
    return to


@inlined
def list_keys(places, starts, step, books, book_step, queries, query_step, rows, octets, trellis):
    """List the octets of keys, and write the numbers that each of their bytes is multiplied with, or looked up in."""
    store_tables(books, book_step, start_of(octets[4]))
    signs, first, to = starts[0], starts[0] + 1, start_of(octets[1])
    if WEIGHTS:
        signs = list_signs(places, starts, step, books, book_step, queries, query_step, rows, octets, trellis)
        first, to = first + 2, to + signs * 2 * rows * WHOLE
    list_channels(places, starts, step, books, book_step, first, signs, octets, trellis)
    query_rows = queries, query_step, rows
    if LAST_OF_FEW:
        to = put_queries(*query_rows, starts[first], starts[LAST_OF_FEW + 1], to)
        first += LAST_OF_FEW
    to = put_queries(*query_rows, starts[first], starts[LAST_OF_TWO + 1], to)
    for i in range(starts[LAST_OF_TWO + 1], starts[ALL]):
        for row in range(rows):
            query = load_one(queries + row * query_step + i * BYTES)
            store_one(to + row * BYTES, query)
        to += 2 * rows * BYTES


@inlined
def list_values(places, starts, step, books, book_step, octets, trellis):
    """List the octets of values."""
    store_tables(books, book_step, start_of(octets[4]))
    list_channels(places, starts, step, books, book_step, starts[0] + 1, starts[0], octets, trellis)
