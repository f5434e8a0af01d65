r"""Attention of a new token over few of the coded ones, on the CPU: scores from high bits, choice, attention, bound.

`grace_opt.kernels.few_coded.host` calls it; `grace_opt.kernels.reading.reference` with
`grace_opt.kernels.reading.TokenRanges` defines the result. All tokens' high bits are read where they lie, as
`grace_opt.kernels.coded.cpu` reads all bits; of the chosen tokens, all bits are copied side by side and read by the
same loops. Items are those of a `grace_opt.kernels.few_coded.table.Lying`: runs are scored and read by any thread,
heads choose one by one, and the result does not depend on the number of threads.
"""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ..._shared.jit import c_function, part
from ..._shared.lanes import add_one
from ..._shared.memory import array_at, empty, zeros
from ...coded.cpu import GROUP, HEADS, NONE, VALUE_WIDTH, WIDTH, arrays_at, attend_item, make_room, make_rooms
from ...coded.cpu.products import no_sums_of_four
from ...coded.forms import NEWEST, ROWS
from ...decode.cpu import NOTHING
from ...reading.cpu.bounds import log_sum
from ...reading.forms import BUCKETS
from ..forms import (
    ABOUT,
    AT_ABOUT,
    AT_BOUNDS,
    AT_CHOSEN,
    AT_COUNTS,
    AT_FIRSTS,
    AT_HEADS,
    AT_LIMITS,
    AT_NUMBERS,
    AT_PLACES,
    AT_RANGES,
    AT_RANKS,
    AT_REACH,
    AT_SCORES,
    AT_SEGMENTS,
    AT_SEQUENCES,
    AT_UPPER,
    BOUNDED,
    CELLS,
    DONE,
    FIRST_CHOSEN,
    FIRST_SEGMENT,
    FRESH,
    GIVEN,
    LAST_SEGMENT,
    LEAST,
    MOST,
    MOST_PLACES,
    MOST_TOKENS,
    OF_HEAD,
    OF_SEGMENT,
    OF_SEQUENCE,
    PHASE,
    PLACES,
    READ,
    READ_TOKENS,
    REST,
    SCORED,
    SEGMENTS,
    STOP,
    UNITS,
    WORD,
)
from .bounds import bound, describe
from .choice import rank, take
from .chosen import room_for_chosen
from .order import places_in_order
from .runs import reach_of, read_run, score_run

EPSILON, TOP_P = range(2)


@part
def choose(phase, pair, arrays, one, segments, limits, work):
    """Rank the units of a head, if they are not yet, and choose the first of them, or more."""
    scores, upper, places, ranks, numbers_at, chosen, counts, heads, about, reach, _ = work
    sizes = arrays[0]
    rows, head, count = sizes[GROUP], heads[pair], one[PLACES]
    if phase == FIRST_CHOSEN:
        dense = empty((rows,), np.float64)
        describe(pair, arrays, reach, head, about[pair], dense)
        head[DONE] = head[STOP] = head[READ_TOKENS] = 0
        if one[UNITS] == 0:
            return
        places_in_order(segments, one[FIRST_SEGMENT], one[LAST_SEGMENT], pair % sizes[HEADS], places[pair])
        mine = scores[pair], dense, limits[TOP_P], one[LEAST], ranks[pair], numbers_at[pair]
        head[STOP] = rank(one, rows, places[pair], *mine)
    if head[STOP] > head[DONE]:
        left, words = upper[pair, :rows], count // WORD
        take(one, head, places[pair], ranks[pair], numbers_at[pair], left, chosen[pair, :words], counts[pair, :words])
        shares = empty((upper.shape[2],), np.float32)
        for row in range(rows):
            about[pair, REST, row], _ = log_sum(left[row], count, shares)


@part
def attend_few(phase, arrays, books, sequences, segments, firsts, ranges, limits, work):
    """Process the items, or heads, of a phase that are not taken yet; threads that call this share them.

    First dense and waiting tokens are read, and runs `SCORED`; then some units are chosen and `READ`, in runs, and what
    is left is `BOUNDED`; the last three as often as needed.

    Parameters
    ----------
    phase : int
    arrays, books
        As `grace_opt.kernels.coded.cpu.attend` has them.
    sequences, segments, firsts
        See `grace_opt.kernels.few_coded.forms`, and `grace_opt.kernels.few_coded.table.Lying`.
    ranges : (3, 9, CELLS) float32
        What high bits stand for.
    limits : (2,) float64
        Epsilon, and the share expected; negative for none.
    work : tuple
        What the phases leave to each other.
    """
    scores, upper, _, _, _, chosen, counts, heads, about, reach, bounds = work
    sizes, items, units, scales, queries, _, ends, products = arrays
    widths, softcap, outer = (sizes[WIDTH], sizes[VALUE_WIDTH]), scales[1] != 0, scales[2]
    most, rows = max(widths), queries.shape[2]
    rooms, room = make_rooms(sizes), make_room(most)
    absolute, turn = zeros((ROWS, most), np.float32), zeros((1,), np.int64)
    turn[0] = NONE
    places = MOST + WORD if phase == READ else 0
    squeezed, logits = room_for_chosen(most, places // WORD), zeros((rows, places), np.float32)
    pieces = items.shape[0] if phase in (SCORED, READ) else heads.shape[0]
    while True:
        piece = add_one(sizes)
        if piece >= pieces:
            return
        if phase in (SCORED, READ):
            pair, first = items[piece, 0], items[piece, 1]
            run, turned = (first, items[piece, 2], items[piece, 3], items[piece, 4]), queries[1, pair]
            is_run = first >= 0 and units[first, NEWEST] < 0
            if phase == READ:
                if is_run and heads[pair, FRESH]:
                    state = ends[0, piece], ends[1, piece], products[piece]
                    own = chosen[pair], counts[pair], state, room, squeezed, logits
                    read_run(run, units, firsts, widths, turned, books, softcap, outer, *own)
            elif is_run:
                for row in range(rows):
                    ends[0, piece, row] = NOTHING
                own = scores[pair], upper[pair], reach[piece], (room, absolute)
                score_run(run, units, firsts, widths[0], turned, ranges, softcap, outer, *own)
            else:
                attend_item(piece, arrays, books, rooms, no_sums_of_four(), turn, None)
                if first >= 0:
                    reach_of(first, items[piece, 2], units, widths[0], ranges, reach[piece], room)
        else:
            one = sequences[piece // sizes[HEADS]]
            if phase == BOUNDED:
                heads[piece, STOP] = bound(piece, arrays, one, heads[piece], about[piece], limits[EPSILON], bounds)
            else:
                heads[piece, FRESH] = phase == FIRST_CHOSEN or heads[piece, STOP] > heads[piece, DONE]
                choose(phase, piece, arrays, one, segments, limits, work)


@c_function("void(intp)")
def attend_few_at(data):
    """`attend_few`, as threads call it: with the addresses of the arrays, and their sizes."""
    given = array_at(data, (GIVEN,), np.int64)
    arrays = arrays_at(given)
    pairs, batch, rows, wide, count = given[0], given[1], given[2], given[3], given[5]
    heads, columns, tokens = pairs // batch, given[MOST_PLACES], given[MOST_TOKENS]
    group = arrays[0][GROUP]
    work = (
        array_at(given[AT_SCORES], (pairs, rows, columns), np.float32),
        array_at(given[AT_UPPER], (pairs, rows, columns), np.float32),
        array_at(given[AT_PLACES], (pairs, tokens), np.int64),
        array_at(given[AT_RANKS], (pairs, tokens), np.int16),
        array_at(given[AT_NUMBERS], (pairs, BUCKETS), np.int64),
        array_at(given[AT_CHOSEN], (pairs, columns // WORD), np.uint64),
        array_at(given[AT_COUNTS], (pairs, columns // WORD), np.int64),
        array_at(given[AT_HEADS], (pairs, OF_HEAD), np.int64),
        array_at(given[AT_ABOUT], (pairs, ABOUT, rows), np.float64),
        array_at(given[AT_REACH], (count, wide), np.float32),
        array_at(given[AT_BOUNDS], (batch, heads * group), np.float64),
    )
    attend_few(
        given[PHASE],
        arrays,
        given[16],
        array_at(given[AT_SEQUENCES], (batch, OF_SEQUENCE), np.int64),
        array_at(given[AT_SEGMENTS], (given[SEGMENTS], OF_SEGMENT), np.int64),
        array_at(given[AT_FIRSTS], (given[6],), np.int64),
        array_at(given[AT_RANGES], (3, 9, CELLS), np.float32),
        array_at(given[AT_LIMITS], (2,), np.float64),
        work,
    )
