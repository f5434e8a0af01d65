"""What the high bits of codes say of logits: their middles, and what they can be at most.

Half of a channel's bits are low ones, rounded down, and not read. The high ones leave a range for each coordinate. A
range's middle, and half its length, are numbers of as many bits as there are high ones; so each range costs a loop over
the middles that is shorter than that over the codes, and one over the halves for widths whose ranges differ.
"""

from __future__ import annotations

import numpy as np

from ..._shared.jit import part
from ..._shared.lanes import load_place
from ..._shared.memory import start_of, zeros
from ...coded.cpu.channels import copy_rest
from ...coded.cpu.products import BLOCK, BLOCK_STEP, PLACE, add_to_rows, adding, no_sums_of_four, of_channel, store_rows
from ...coded.cpu.rows import scale_queries
from ...coded.forms import ROWS
from ...coded.forms import WIDTHS as LEVEL_BITS
from ...decode.cpu import NOTHING, ZERO, cap
from ...decode.cpu.rows import BYTES
from ..forms import HALVES, MIDDLES, TOPS, WORD

#: High and low bits of each of `grace_opt.kernels.coded.forms.WIDTHS`.
HIGH, LOW = (0, 1, 1, 2, 2, 3, 3, 4), (0, 0, 1, 1, 2, 2, 3, 4)
#: These widths, by their numbers, have ranges of one length.
TWO, EIGHT = 2, 7
_middles1, _middles2, _middles3, _middles4 = (adding(bits, of_channel) for bits in (1, 2, 3, 4))
_halves2, _halves3 = (adding(bits, of_channel, sums=()) for bits in (2, 3))


@part
def add_ranges(places, starts, offset, step, count, four, query_step, constants, books, out, upper, out_step):
    """Write the middles of the logits of four rows with `count` keys, a multiple of `BLOCK`, and their largest values.

    `places` has the address of each channel's first high plane, channels in the order of their widths, of which width
    number w has those from ``starts[w]`` to ``starts[w + 1]``. `four` has the addresses of queries, in the same order,
    and of their absolute values, `books` those of the tables, and the step between rows; `constants` are what is added
    to both results, and then to the largest alone.
    """
    (queries, sizes), (middles, halves, book_step) = four, books
    none = no_sums_of_four()
    for t in range(0, count, BLOCK):
        sums = add_to_rows(start_of(constants), none)
        at = offset + t // 8
        for i in range(starts[1], starts[2]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _middles1(place, step, middles + 1 * book_step, query, query_step, sums)
        for i in range(starts[2], starts[3]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _middles1(place, step, middles + 2 * book_step, query, query_step, sums)
        for i in range(starts[3], starts[4]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _middles2(place, step, middles + 3 * book_step, query, query_step, sums)
        for i in range(starts[4], starts[5]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _middles2(place, step, middles + 4 * book_step, query, query_step, sums)
        for i in range(starts[5], starts[6]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _middles3(place, step, middles + 5 * book_step, query, query_step, sums)
        for i in range(starts[6], starts[7]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _middles3(place, step, middles + 6 * book_step, query, query_step, sums)
        for i in range(starts[7], starts[8]):
            place, query = load_place(places + i * PLACE) + at, queries + i * BYTES
            sums = _middles4(place, step, middles + 8 * book_step, query, query_step, sums)
        store_rows(out + t * BYTES, out_step, sums)
        sums = add_to_rows(start_of(constants) + ROWS * BYTES, sums)
        for i in range(starts[3], starts[4]):
            place, query = load_place(places + i * PLACE) + at, sizes + i * BYTES
            sums = _halves2(place, step, halves + 3 * book_step, query, query_step, sums)
        for i in range(starts[4], starts[5]):
            place, query = load_place(places + i * PLACE) + at, sizes + i * BYTES
            sums = _halves2(place, step, halves + 4 * book_step, query, query_step, sums)
        for i in range(starts[5], starts[6]):
            place, query = load_place(places + i * PLACE) + at, sizes + i * BYTES
            sums = _halves3(place, step, halves + 5 * book_step, query, query_step, sums)
        for i in range(starts[6], starts[7]):
            place, query = load_place(places + i * PLACE) + at, sizes + i * BYTES
            sums = _halves3(place, step, halves + 6 * book_step, query, query_step, sums)
        store_rows(upper + t * BYTES, out_step, sums)


@part
def raise_to(order, scales, means, starts, ranges, reach):
    """Raise the channels' largest coordinates to those of a unit."""
    for level in range(8):
        for i in range(starts[level], starts[level + 1]):
            x = abs(means[order[i]])
            if level > 0:
                x += abs(scales[i]) * ranges[TOPS, LEVEL_BITS[level], 0]
            reach[order[i]] = max(reach[order[i]], x)


@part
def score_unit(unit, width, turned, ranges, softcap, outer, scores, upper, reach, room):
    """Write what the high bits say of a part of a unit, for four rows at a time.

    Parameters
    ----------
    unit : tuple
        First token, the one after the last, bytes of a plane, how many tokens are read where they lie, and the place of
        the first one.
    turned : (rows, …) float32
        Queries in the coordinates of the keys.
    ranges : (3, 9, CELLS) float32
    scores, upper : (rows, …) float32
        Written, from the place on, to the end of the last word: minus infinity where there is no token.
    reach : (d,) float32
        Raised to the channels' largest coordinates.
    room : tuple
        As `grace_opt.kernels.coded.cpu.make_room` made it, with channels sorted; and for absolute queries.
    """
    a, b, stride, whole, place = unit
    (_, order, addresses, scales, means, starts, bits, bits_at, scaled, _, _, _), sizes = room
    raise_to(order, scales, means, starts, ranges, reach)
    for level in range(8):
        for i in range(starts[level], starts[level + 1]):
            addresses[i] += LOW[level] * stride
    constants, end = zeros((2 * ROWS,), np.float32), place + (b - a + WORD - 1) // WORD * WORD
    step, book_step, query_step = scores.shape[1] * BYTES, ranges.shape[2] * BYTES, scaled.shape[1] * BYTES
    middles, halves = start_of(ranges[MIDDLES]), start_of(ranges[HALVES])
    if whole < b - a:
        copy_rest(addresses, starts, (a + whole) // 8, stride, (b - a - whole + 7) // 8, HIGH, bits, bits_at)
    for row in range(0, turned.shape[0], ROWS):
        scale_queries(turned[row : row + ROWS], width, order, scales, means, constants, scaled)
        for r in range(ROWS):
            constants[ROWS + r] = ZERO
            for i in range(width):
                sizes[r, i] = abs(scaled[r, i])
            for i in range(starts[TWO], starts[TWO + 1]):
                constants[ROWS + r] += sizes[r, i] * ranges[HALVES, LEVEL_BITS[TWO], 0]
            for i in range(starts[EIGHT], starts[EIGHT + 1]):
                constants[ROWS + r] += sizes[r, i] * ranges[HALVES, LEVEL_BITS[EIGHT], 0]
        pair, books = (start_of(scaled), start_of(sizes)), (middles, halves, book_step)
        out, most = start_of(scores[row]) + place * BYTES, start_of(upper[row]) + place * BYTES
        at, offset, plane, some = start_of(addresses), a // 8, stride, whole
        for rest in range(2):  # one call is one copy of the loops
            if rest and whole < b - a:
                at, offset, plane, some = start_of(bits_at), 0, BLOCK_STEP, BLOCK
                out, most = out + whole * BYTES, most + whole * BYTES
            elif rest:
                break
            add_ranges(at, starts, offset, plane, some, pair, query_step, constants, books, out, most, step)
        for r in range(row, row + ROWS):
            if softcap:
                cap(scores[r, place:end], outer)
                cap(upper[r, place:end], outer)
            for t in range(place + b - a, end):
                scores[r, t] = upper[r, t] = NOTHING
