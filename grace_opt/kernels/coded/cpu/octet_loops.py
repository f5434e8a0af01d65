"""Products of a few rows with numbers of a few bits, eight planes at a time: logits from keys, sums from values.

Functions as in :mod:`grace_opt.kernels.coded.cpu.products`, which read one channel at a time.

When: processors with AVX-512 and GFNI.
"""

from __future__ import annotations

from ..._shared.jit import part
from ..._shared.lanes import WIDEST, load_four, store
from ..._shared.memory import start_of
from ..forms import ROWS
from .channels import ALL
from .octet_lists import KINDS, LAST_OF_TWO, begin, list_keys, list_values
from .octets import (
    ENTRY,
    PLACE,
    WHOLE,
    add_sums_of_signs,
    keys_of_eight,
    keys_of_five,
    keys_of_seven,
    keys_of_six,
    keys_of_two,
    load_shares,
    read_next,
    store_totals,
    values_of_eight,
    values_of_five,
    values_of_seven,
    values_of_six,
    values_of_two,
)
from .products import BLOCK, BYTES, VECTORS, add_to_rows, store_rows

#: Octets whose totals stay in the processor's nearest cache, while all of a run's shares pass.
AT_ONCE = 32
SIZE = ENTRY * PLACE


@part
def add_logits(
    places, starts, offset, step, count, queries, query_step, constants, books, book_step, out, out_step, none,
    room, longer,
):  # fmt: skip
    """Write the logits of some rows with `count` keys, whole blocks; `room` has octets, and what is read afterwards.

    `longer` is None if no channel has seven bits.
    """
    octets, coming = room
    rows = len(none) // VECTORS
    list_keys(places, starts, step, books, book_step, queries, query_step, rows, octets)
    at, factors, ends, more = start_of(octets[0]), start_of(octets[1]), octets[2], 2 * rows * WHOLE
    cursor = begin(octets, starts[0], ends[KINDS - 1], offset, offset + (count - BLOCK) // 8, coming)
    octet = none[0]
    if ends[KINDS - 1] > 0 and count > 0:
        octet = read_next(cursor)
    for t in range(0, count, BLOCK):
        sums = add_to_rows(start_of(constants), none)
        for i in range(ends[0]):
            ahead = read_next(cursor)
            sums = add_sums_of_signs(at + i * SIZE, octet, factors + i * more, sums)
            octet = ahead
        for i in range(ends[0], ends[1]):
            ahead = read_next(cursor)
            sums = keys_of_two(at + i * SIZE, octet, factors + i * more, sums)
            octet = ahead
        for i in range(ends[1], ends[2]):
            ahead = read_next(cursor)
            sums = keys_of_five(at + i * SIZE, octet, factors + i * more, sums)
            octet = ahead
        for i in range(ends[2], ends[3]):
            ahead = read_next(cursor)
            sums = keys_of_six(at + i * SIZE, octet, factors + i * more, sums)
            octet = ahead
        for i in range(ends[3], ends[4]):
            ahead = read_next(cursor)
            sums = keys_of_eight(at + i * SIZE, octet, factors + i * more, sums)
            octet = ahead
        if longer is not None:
            for i in range(ends[4], ends[5]):
                ahead = read_next(cursor)
                sums = keys_of_seven(at + i * SIZE, octet, factors + i * more, sums)
                octet = ahead
        store_rows(out + t * BYTES, out_step, sums)


@part
def add_values(places, starts, offset, step, count, shares, share_step, books, book_step, sums, none, room, longer):
    """Add to `ROWS` sums per channel the shares of some rows times `count` numbers, whole blocks; `room` and
    `longer` as above."""
    if count == 0:
        return
    octets, coming = room
    list_values(places, starts, step, books, book_step, octets)
    at, totals, ends, more = start_of(octets[0]), start_of(octets[1]), octets[2], 2 * ROWS * WHOLE
    every = ends[KINDS - 1]
    for first in range(0, every, AT_ONCE):
        last = min(first + AT_ONCE, every)
        cursor = begin(octets, first, last, offset, offset + (count - BLOCK) // 8, coming)
        octet = read_next(cursor)
        for t in range(0, count, BLOCK):
            given = load_shares(shares + t * BYTES, share_step, none)
            for i in range(first, min(last, ends[1])):
                ahead = read_next(cursor)
                values_of_two(at + i * SIZE, octet, totals + i * more, given, t)
                octet = ahead
            for i in range(max(first, ends[1]), min(last, ends[2])):
                ahead = read_next(cursor)
                values_of_five(at + i * SIZE, octet, totals + i * more, given, t)
                octet = ahead
            for i in range(max(first, ends[2]), min(last, ends[3])):
                ahead = read_next(cursor)
                values_of_six(at + i * SIZE, octet, totals + i * more, given, t)
                octet = ahead
            for i in range(max(first, ends[3]), min(last, ends[4])):
                ahead = read_next(cursor)
                values_of_eight(at + i * SIZE, octet, totals + i * more, given, t)
                octet = ahead
            if longer is not None:
                for i in range(max(first, ends[4]), min(last, ends[5])):
                    ahead = read_next(cursor)
                    values_of_seven(at + i * SIZE, octet, totals + i * more, given, t)
                    octet = ahead
    for sixteen in range(0, every * 2 * ROWS, WIDEST):
        store_totals(totals + sixteen * WHOLE, totals + sixteen * BYTES)
    of_two = starts[LAST_OF_TWO + 1] - starts[1]
    for i in range(starts[1], starts[ALL]):
        half = i - starts[1]
        half = half if half < of_two else of_two + of_two % 2 + (half - of_two) * 2
        to = sums + i * ROWS * BYTES
        store(to, load_four(to) + load_four(totals + half * ROWS * BYTES))
