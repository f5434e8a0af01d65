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
from .octet_lists import KINDS, LAST_OF_TWO, ask, begin_to_ask, list_keys, list_values, make_some
from .octets import (
    ENTRY,
    LINE,
    PLACE,
    WHOLE,
    add_sums_of_signs,
    add_to_one,
    add_to_two,
    keys_of_eight,
    keys_of_five,
    keys_of_seven,
    keys_of_six,
    keys_of_two,
    store_totals,
    values_of_eight,
    values_of_five,
    values_of_seven,
    values_of_six,
    values_of_two,
)
from .products import BLOCK, BYTES, VECTORS, add_to_rows, store_rows

#: Octets whose totals stay in the processor's nearest cache, with the bytes that they are made of.
TOGETHER = 32
SIZE = ENTRY * PLACE


@part
def read_from(places, starts, offset, stride, count, beyond, longer):
    """Where `count` tokens are read: all where they lie. Parameters as for `grace_opt.kernels.coded.cpu.longer`."""
    return offset, stride, count


@part
def is_trellis(starts, longer):
    """1 if codes are those of a trellis, else 0; no literal, as the parts would be compiled for it, too."""
    found = starts[0]
    if longer is not None and longer.shape[0] > 0:
        found += 1
    return found


@part
def add_logits(
    places, starts, offset, step, count, queries, query_step, constants, books, book_step, out, out_step, none,
    room, longer,
):  # fmt: skip
    """Write the logits of some rows with `count` keys; `room` has octets, and what is read afterwards.

    `longer` is None if there is no trellis, and without one has no entries.
    """
    octets, coming = room
    rows = len(none) // VECTORS
    given = places, starts, step, books, book_step, queries, query_step, rows, octets
    list_keys(*given, is_trellis(starts, longer))
    entries, ends, more, few = start_of(octets[0]), octets[2], 2 * rows * WHOLE, 2 * rows * BYTES
    factors = start_of(octets[1])
    others = factors + ends[0] * (more - few)
    begin_to_ask(octets, coming)
    for t in range(0, count, LINE * 8):
        size = min((count - t + 7) // 8, LINE)
        line, next_line = make_some(octets, starts[0], ends[KINDS - 1], offset + t // 8, size)
        for block in range(t, t + size * 8, BLOCK):
            sums, some = add_to_rows(start_of(constants), none), ends[KINDS - 1] // KINDS + 1
            ask(octets, coming, some)
            for i in range(ends[0]):
                sums = add_sums_of_signs(entries + i * SIZE, line + i * LINE, factors + i * more, sums)
            ask(octets, coming, some)
            for i in range(ends[0], ends[1]):
                sums = keys_of_two(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            ask(octets, coming, some)
            for i in range(ends[1], ends[2]):
                sums = keys_of_five(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            ask(octets, coming, some)
            for i in range(ends[2], ends[3]):
                sums = keys_of_six(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            ask(octets, coming, some)
            for i in range(ends[3], ends[4]):
                sums = keys_of_eight(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            if longer is not None:
                for i in range(ends[4], ends[5]):
                    sums = keys_of_seven(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            store_rows(out + block * BYTES, out_step, sums)
            line += next_line


@part
def add_values(places, starts, offset, step, count, shares, share_step, books, book_step, sums, none, room, longer):
    """Add to `ROWS` sums per channel the shares of some rows times `count` numbers; `room` and `longer` as above.

    Behind the last one's, shares are 0 up to a whole block.
    """
    octets, coming = room
    list_values(places, starts, step, books, book_step, octets, is_trellis(starts, longer))
    entries, totals, ends = start_of(octets[0]), start_of(octets[1]), octets[2]
    every, more = ends[KINDS - 1], 2 * ROWS * WHOLE
    begin_to_ask(octets, coming)
    if count == 0:
        return
    for t in range(0, count, LINE * 8):
        size, at = min((count - t + 7) // 8, LINE), shares + t * BYTES
        lines = (size + PLACE - 1) // PLACE
        stop = at + lines * BLOCK * BYTES
        for first in range(0, every, TOGETHER):
            last = min(first + TOGETHER, every)
            line, next_line = make_some(octets, first, last, offset + t // 8, size)
            line -= first * LINE
            for i in range(first, min(last, ends[1])):
                found, own = none, line + i * LINE
                for share in range(at, stop, BLOCK * BYTES):
                    found = values_of_two(entries + i * SIZE, own, share, share_step, found)
                    own += next_line
                ask(octets, coming, lines)
                add_to_two(found, totals + i * more, t)
            for i in range(max(first, ends[1]), min(last, ends[2])):
                found, own = none, line + i * LINE
                for share in range(at, stop, BLOCK * BYTES):
                    found = values_of_five(entries + i * SIZE, own, share, share_step, found)
                    own += next_line
                ask(octets, coming, lines)
                add_to_one(found, totals + i * more, t)
            for i in range(max(first, ends[2]), min(last, ends[3])):
                found, own = none, line + i * LINE
                for share in range(at, stop, BLOCK * BYTES):
                    found = values_of_six(entries + i * SIZE, own, share, share_step, found)
                    own += next_line
                ask(octets, coming, lines)
                add_to_one(found, totals + i * more, t)
            for i in range(max(first, ends[3]), min(last, ends[4])):
                found, own = none, line + i * LINE
                for share in range(at, stop, BLOCK * BYTES):
                    found = values_of_eight(entries + i * SIZE, own, share, share_step, found)
                    own += next_line
                ask(octets, coming, lines)
                add_to_one(found, totals + i * more, t)
            if longer is not None:
                for i in range(max(first, ends[4]), min(last, ends[5])):
                    found, own = none, line + i * LINE
                    for share in range(at, stop, BLOCK * BYTES):
                        found = values_of_seven(entries + i * SIZE, own, share, share_step, found)
                        own += next_line
                    ask(octets, coming, lines)
                    add_to_one(found, totals + i * more, t)
    for sixteen in range(0, every * 2 * ROWS, WIDEST):
        store_totals(totals + sixteen * WHOLE, totals + sixteen * BYTES)
    of_two = starts[LAST_OF_TWO + 1] - starts[1]
    for i in range(starts[1], starts[ALL]):
        half = i - starts[1]
        half = half if half < of_two else of_two + of_two % 2 + (half - of_two) * 2
        to = sums + i * ROWS * BYTES
        store(to, load_four(to) + load_four(totals + half * ROWS * BYTES))
