"""Products of a few rows with numbers of a few bits, eight planes at a time: logits from keys, sums from values.

Functions as in :mod:`grace_opt.kernels.cache.coded.cpu.products`, which read one channel at a time.

When: processors with AVX2 or AVX-512 (`grace_opt.kernels._shared.lanes.OCTETS`).
"""

from __future__ import annotations

from ...._shared.jit import inlined
from ...._shared.lanes import WIDEST, load_four, store
from ...._shared.memory import start_of
from ..forms import ROWS
from .channels import ALL
from .octet_bytes import ENTRY, LINE, PLACE
from .octet_lists import (
    KINDS,
    LAST_OF_FEW,
    LAST_OF_TWO,
    WEIGHTS,
    begin_to_prefetch,
    list_keys,
    list_values,
    make_some,
    prefetch,
)
from .octets import (
    WHOLE,
    add_sums_of_signs,
    add_to_one,
    add_to_two,
    keys_of_eight,
    keys_of_few,
    keys_of_five,
    keys_of_seven,
    keys_of_six,
    keys_of_two,
    store_totals,
    values_of_eight,
    values_of_few,
    values_of_five,
    values_of_seven,
    values_of_six,
    values_of_two,
)
from .products import BLOCK, BLOCK_STEP, BYTES, VECTORS, add_to_rows, store_rows

#: Octets whose totals stay in the processor's nearest cache, with the bytes that they are made of.
TOGETHER = 32
SIZE = ENTRY * PLACE
#: Of the octets of the first kind, what adds to sums of keys, and the bytes of a row's numbers that it needs.
keys_of_first, OF_FIRST = (add_sums_of_signs, 2 * WHOLE) if WEIGHTS else (keys_of_few, 2 * BYTES)


@inlined
def next_block(line, next_line, t):
    """Return where the bytes of the tokens behind a block are; number ``t - 1`` of those made at once is its last.

    A line's tokens are those of `VECTORS` vectors, or, of narrower ones, twice as many: their codes stand in the next
    bytes of the same integers.
    """
    if LINE > BLOCK and t % LINE:
        return line + VECTORS
    return line + next_line - (LINE // BLOCK - 1) * VECTORS


@inlined
def read_from(places, starts, offset, stride, count, beyond, longer):
    """Return where `count` tokens are read: all in place. Parameters as for `kernels.cache.coded.cpu.longer`."""
    return offset, stride, count


@inlined
def is_trellis(starts, longer):
    """Return 1 if codes are those of a trellis, else 0; no literal, for which other code would be compiled."""
    trellis = starts[0]
    if longer is not None and longer.shape[0] > 0:
        trellis += 1
    return trellis


@inlined
def add_logits(
    places, starts, offset, step, count, queries, query_step, constants, books, book_step, out, out_step, none,
    workspace, longer,
):  # fmt: skip
    """Write the logits of some rows with `count` keys; `workspace` has octets, and what is read afterwards.

    `longer` is None if there is no trellis, and without one has no entries.
    """
    octets, upcoming = workspace
    rows = len(none) // VECTORS
    arguments = places, starts, step, books, book_step, queries, query_step, rows, octets
    list_keys(*arguments, is_trellis(starts, longer))
    entries, ends, more, few = start_of(octets[0]), octets[2], rows * OF_FIRST, 2 * rows * BYTES
    factors = start_of(octets[1])
    others = factors + ends[0] * (more - few)
    begin_to_prefetch(octets, upcoming)
    for t in range(0, count, LINE * 8):
        size = min((count - t + 7) // 8, LINE)
        line, next_line = make_some(octets, starts[0], ends[KINDS - 1], offset + t // 8, size)
        for block in range(t, t + size * 8, BLOCK):
            sums = add_to_rows(start_of(constants), none)
            lines = ends[KINDS - 1] * BLOCK_STEP // (PLACE * KINDS) + 1
            prefetch(octets, upcoming, lines)
            for i in range(ends[0]):
                sums = keys_of_first(entries + i * SIZE, line + i * LINE, factors + i * more, sums)
            prefetch(octets, upcoming, lines)
            for i in range(ends[0], ends[1]):
                sums = keys_of_two(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            prefetch(octets, upcoming, lines)
            for i in range(ends[1], ends[2]):
                sums = keys_of_five(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            prefetch(octets, upcoming, lines)
            for i in range(ends[2], ends[3]):
                sums = keys_of_six(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            prefetch(octets, upcoming, lines)
            for i in range(ends[3], ends[4]):
                sums = keys_of_eight(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            if longer is not None:
                for i in range(ends[4], ends[5]):
                    sums = keys_of_seven(entries + i * SIZE, line + i * LINE, others + i * few, sums)
            store_rows(out + block * BYTES, out_step, sums)
            line = next_block(line, next_line, block + BLOCK)


@inlined
def add_values(
    places, starts, offset, step, count, shares, share_step, books, book_step, sums, none, workspace, longer
):
    """Add to `ROWS` sums per channel the shares of some rows times `count` numbers; `workspace` and `longer` as above.

    Behind the last one's, shares are 0 up to a whole block.
    """
    octets, upcoming = workspace
    list_values(places, starts, step, books, book_step, octets, is_trellis(starts, longer))
    entries, totals, ends = start_of(octets[0]), start_of(octets[1]), octets[2]
    every, more = ends[KINDS - 1], 2 * ROWS * WHOLE
    begin_to_prefetch(octets, upcoming)
    if count == 0:
        return
    for t in range(0, count, LINE * 8):
        size, begin = min((count - t + 7) // 8, LINE), shares + t * BYTES
        lines = (size + PLACE - 1) // PLACE  # an eighth of the tokens' bytes
        stop = begin + (size + BLOCK_STEP - 1) // BLOCK_STEP * BLOCK * BYTES
        for first in range(0, every, TOGETHER):
            last = min(first + TOGETHER, every)
            line, next_line = make_some(octets, first, last, offset + t // 8, size)
            line -= first * LINE
            if LAST_OF_FEW:
                for i in range(first, min(last, ends[0])):
                    products, own = none, line + i * LINE
                    for share in range(begin, stop, BLOCK * BYTES):
                        products = values_of_few(entries + i * SIZE, own, share, share_step, products)
                        own = next_block(own, next_line, (share - begin) // BYTES + BLOCK)
                    prefetch(octets, upcoming, lines)
                    add_to_two(products, totals + i * more, t)
            for i in range(max(first, ends[0]), min(last, ends[1])):
                products, own = none, line + i * LINE
                for share in range(begin, stop, BLOCK * BYTES):
                    products = values_of_two(entries + i * SIZE, own, share, share_step, products)
                    own = next_block(own, next_line, (share - begin) // BYTES + BLOCK)
                prefetch(octets, upcoming, lines)
                add_to_two(products, totals + i * more, t)
            for i in range(max(first, ends[1]), min(last, ends[2])):
                products, own = none, line + i * LINE
                for share in range(begin, stop, BLOCK * BYTES):
                    products = values_of_five(entries + i * SIZE, own, share, share_step, products)
                    own = next_block(own, next_line, (share - begin) // BYTES + BLOCK)
                prefetch(octets, upcoming, lines)
                add_to_one(products, totals + i * more, t)
            for i in range(max(first, ends[2]), min(last, ends[3])):
                products, own = none, line + i * LINE
                for share in range(begin, stop, BLOCK * BYTES):
                    products = values_of_six(entries + i * SIZE, own, share, share_step, products)
                    own = next_block(own, next_line, (share - begin) // BYTES + BLOCK)
                prefetch(octets, upcoming, lines)
                add_to_one(products, totals + i * more, t)
            for i in range(max(first, ends[3]), min(last, ends[4])):
                products, own = none, line + i * LINE
                for share in range(begin, stop, BLOCK * BYTES):
                    products = values_of_eight(entries + i * SIZE, own, share, share_step, products)
                    own = next_block(own, next_line, (share - begin) // BYTES + BLOCK)
                prefetch(octets, upcoming, lines)
                add_to_one(products, totals + i * more, t)
            if longer is not None:
                for i in range(max(first, ends[4]), min(last, ends[5])):
                    products, own = none, line + i * LINE
                    for share in range(begin, stop, BLOCK * BYTES):
                        products = values_of_seven(entries + i * SIZE, own, share, share_step, products)
                        own = next_block(own, next_line, (share - begin) // BYTES + BLOCK)
                    prefetch(octets, upcoming, lines)
                    add_to_one(products, totals + i * more, t)
    for number in range(0, every * 2 * ROWS, WIDEST):
        store_totals(totals + number * WHOLE, totals + number * BYTES)
    add_halves(starts, starts[1], starts[LAST_OF_TWO + 1], sums, totals)


@inlined
def add_halves(starts, first, single, sums, totals):
    """Add to sums of channels those of octets, two for each; channels from `single` on have an octet each."""
    half = first * 0
    for i in range(first, starts[ALL]):
        if i >= single or i == starts[LAST_OF_FEW + 1]:
            half += half % 2
        to = sums + i * ROWS * BYTES
        store(to, load_four(to) + load_four(totals + half * ROWS * BYTES))
        half += 1
