r"""Attention of a new token over few of the coded ones, on the CPU: scores from high bits, choice, attention, bound.

`grace_opt.kernels.few_coded.host` calls it; `grace_opt.kernels.reading.reference` with
`grace_opt.kernels.reading.TokenRanges` defines the result. All tokens' high bits are read where they lie, as
`grace_opt.kernels.coded.cpu` reads all bits; of the chosen tokens, all bits are copied side by side and read by the
same loops. Items are those of a `grace_opt.kernels.few_coded.table.Lying`: runs are scored and read by any thread,
heads choose one by one, and the result does not depend on the number of threads.
"""

from __future__ import annotations

import math

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np
from numba.np.numpy_support import carray

from ..._shared.jit import c_function, part
from ..._shared.lanes import add_one, pointer
from ...coded.cpu import (
    GROUP,
    HEADS,
    IN_TAIL,
    KEY_BASIS,
    NEWS,
    OF_SEQUENCE,
    SEQUENCES,
    SINK_KEYS,
    SINKS,
    TAIL_KEYS,
    VALUE_WIDTH,
    WIDTH,
    arrays_at,
    attend_item,
    make_room,
    make_rooms,
    safe_part,
)
from ...coded.cpu.channels import sort_channels
from ...coded.cpu.products import BYTES, PAIR_STEP, add_logits, add_values
from ...coded.cpu.rows import add_products, clear_totals, scale_queries
from ...coded.forms import COUNT, END, KEYS, NEWEST, ROWS, VALUES
from ...coded.forms import PLANES as PLANES_AT
from ...coded.forms import WIDTHS as LEVEL_BITS
from ...decode.cpu import LOG2E, NOTHING, cap, integers, numbers, turn_into_shares
from ...reading.cpu import bound_of, joined, log_sum, raise_reach, terms_of
from ...reading.forms import BUCKETS
from .. import forms
from ..forms import (
    ABOUT,
    AROUND,
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
    FIRST_ITEM,
    FIRST_SEGMENT,
    FRESH,
    GIVEN,
    LAST_ITEM,
    LAST_SEGMENT,
    LEAST,
    MOST,
    MOST_PLACES,
    MOST_TOKENS,
    OF_HEAD,
    OF_SEGMENT,
    PHASE,
    PLACES,
    READ,
    READ_TOKENS,
    REST,
    SCORED,
    SEGMENTS,
    STEP,
    STOP,
    TERMS,
    UNITS,
    WORD,
)
from .choice import coded_terms, raise_all, rank, take
from .chosen import find_moves, find_offsets, hide_gaps, room_for_chosen, squeeze_planes
from .order import places_in_order
from .ranges import score_unit

#: Numbers in a row of the codebooks, in bytes.
BOOK = 256 * BYTES
EPSILON, TOP_P = range(2)


@part
def score_run(run, units, firsts, width, turned, ranges, softcap, outer, scores, upper, reach, room):
    """Score the tokens of a run: ``(first unit, the one after the last, first place, the one after the last)``."""
    shared, _ = room
    levels, order, addresses, scales, means, starts = shared[:6]
    for unit in range(run[0], run[1]):
        first, count = firsts[unit], units[unit, COUNT]
        a, b, stride = max(run[2] - first, 0), min(run[3] - first, count), (count + 7) // 8
        if a >= b:
            continue
        fields = units[unit, KEYS:]
        behind = sort_channels(
            fields, stride, width, a // 8, (b - a + 7) // 8, levels, order, addresses, scales, means, starts
        )
        whole = safe_part(b - a, a // 8, stride, behind, units[unit, KEYS + END])
        one = a, b, stride, whole, first + a
        score_unit(one, width, turned, ranges, softcap, outer, scores, upper, reach, room)


@part
def reach_of(first, last, units, width, ranges, reach, room):
    """Raise the channels' largest coordinates to those of units that are read in any case."""
    levels, order, addresses, scales, means, starts = room[:6]
    nothing = first * 0  # no literal: the part would be compiled for it, too
    for unit in range(first, last):
        fields = units[unit, KEYS:]
        sort_channels(fields, nothing, width, nothing, nothing, levels, order, addresses, scales, means, starts)
        for level in range(8):
            for i in range(starts[level], starts[level + 1]):
                x = abs(means[order[i]])
                if level > 0:
                    x += abs(scales[i]) * ranges[forms.TOPS, LEVEL_BITS[level], 0]
                reach[order[i]] = max(reach[order[i]], x)


@part
def read_run(run, units, firsts, widths, turned, books, softcap, outer, chosen, counts, state, room, squeezed, logits):
    """Attend to the chosen tokens of a run; its maxima, sums and products so far are in `state`."""
    largest, sums, products = state
    levels, order, addresses, scales, means, starts, _, _, scaled, totals = room
    moves, offsets, bits, bits_at, few = squeezed
    query_step, logit_step, rows = scaled.shape[1] * BYTES, logits.shape[1] * BYTES, turned.shape[0]
    (width, value_width), (first, last, start, stop) = widths, run
    constants, nowhere = np.zeros(ROWS, np.float32), books * 0  # no literal: the parts would be compiled for it, too
    step_of_book, at_start = nowhere + BOOK, nowhere
    place = end = nowhere
    for tensor in (KEYS, VALUES):
        if tensor == VALUES:
            for row in range(rows):
                largest[row], shrink, more = turn_into_shares(logits[row], place, largest[row])
                sums[row] = sums[row] * shrink + more
                if shrink != 1:
                    for c in range(value_width):
                        products[row, c] *= shrink
        wide, place = width if tensor == KEYS else value_width, nowhere
        for unit in range(first, last):
            base, count = firsts[unit], units[unit, COUNT]
            a, b, stride = max(start - base, 0), min(stop - base, count), (count + 7) // 8
            if a >= b:
                continue
            word, words = (base + a) // WORD, (b - a + WORD - 1) // WORD
            own = counts[word : word + words]
            find_offsets(own, offsets)
            if offsets[words] == 0:
                continue
            find_moves(chosen[word : word + words], moves)
            fields, size = units[unit, tensor:], (b - a + 7) // 8
            behind = sort_channels(fields, stride, wide, a // 8, size, levels, order, addresses, scales, means, starts)
            planes = fields[PLANES_AT], (behind - fields[PLANES_AT]) // stride
            step = squeeze_planes(planes, a // 8, stride, fields[END], words, moves, offsets, bits, few)
            for i in range(wide):
                bits_at[i] = bits.ctypes.data + (addresses[i] - fields[PLANES_AT]) // stride * step
            some, at = (offsets[words] + PAIR_STEP - 1) // PAIR_STEP * PAIR_STEP * 8, bits_at.ctypes.data
            end = place + some
            for row in range(0, rows, ROWS):
                to, four = logits[row].ctypes.data + place * BYTES, turned[row : row + ROWS]
                if tensor == KEYS:
                    scale_queries(four, width, order, scales, means, constants, scaled)
                    given = scaled.ctypes.data, query_step, constants, books, step_of_book
                    add_logits(at, starts, at_start, step, some, *given, to, logit_step)
                    for r in range(row, row + ROWS):
                        if softcap:
                            cap(logits[r, place:end], outer)
                        hide_gaps(own, offsets, logits[r, place:end])
                else:
                    clear_totals(totals, value_width)
                    add_values(
                        at, starts, at_start, step, some, to, logit_step, books, step_of_book, totals.ctypes.data
                    )
                    mine = logits[row : row + ROWS], place, end, totals, value_width
                    add_products(*mine, order, scales, means, products[row : row + ROWS])
            place = end
        if place == 0:
            break


@part
def describe(pair, arrays, reach, own, about, dense):
    """Write what the terms of products add up to, and logarithms of the sums over what is always read."""
    sizes, _, _, scales, queries, _, ends, _ = arrays
    rows, width, heads = sizes[GROUP], sizes[WIDTH], sizes[HEADS]
    b, h = pair // heads, pair % heads
    of = sizes[SEQUENCES + b * OF_SEQUENCE :]
    full, around = queries[0, pair], np.zeros(queries.shape[3], np.float32)
    raise_reach(of[SINK_KEYS] + h * of[SINK_KEYS + 1], of[SINK_KEYS + 2], of[SINKS], width, around)
    tail = sizes[TAIL_KEYS] + b * sizes[TAIL_KEYS + 1] + h * sizes[TAIL_KEYS + 2]
    raise_reach(tail, sizes[TAIL_KEYS + 3], sizes[IN_TAIL], width, around)
    largest = np.zeros(reach.shape[1], np.float32)
    for row in range(rows):
        dense[row] = -np.inf
    for item in range(own[FIRST_ITEM], own[LAST_ITEM]):
        raise_all(largest, reach[item])
        for row in range(rows):
            more = joined(ends[0, item, row], ends[1, item, row])
            if more > -np.inf:
                top = max(more, dense[row])
                dense[row] = top + math.log2(2.0 ** (more - top) + 2.0 ** (dense[row] - top))
    basis = of[KEY_BASIS] + h * of[KEY_BASIS + 1] if of[KEY_BASIS] else of[KEY_BASIS]
    coded_terms(full, queries[1, pair], rows, width, basis, largest, about[TERMS])
    for row in range(rows):
        about[AROUND, row] = terms_of(full[row], around, width)
        if scales[1] != 0:  # a cap is steepest at 0, where it changes nothing; its own rounding is of its height
            for n in (TERMS, AROUND):
                about[n, row] = about[n, row] * np.float64(scales[2]) / (2 * np.float64(LOG2E)) + np.float64(scales[2])


@part
def bound(pair, arrays, one, head, about, epsilon, bounds):
    """Bound what was not read; return how many units are to be read then, more if there are too few."""
    sizes, ends = arrays[0], arrays[6]
    b, h, rows, worst = pair // sizes[HEADS], pair % sizes[HEADS], sizes[GROUP], 0.0
    every = sizes[SEQUENCES + b * OF_SEQUENCE + SINKS] + one[forms.TOKENS] + sizes[NEWS]
    for row in range(rows):
        top, divisor = NOTHING, np.float32(0.0)
        for item in range(head[FIRST_ITEM], head[LAST_ITEM]):
            top = max(top, ends[0, item, row])
        for item in range(head[FIRST_ITEM], head[LAST_ITEM]):
            if ends[1, item, row] != 0:
                divisor += np.float32(2.0) ** (ends[0, item, row] - top) * ends[1, item, row]
        terms = about[TERMS, row]
        rest = about[REST, row] if head[DONE] < one[UNITS] else -np.inf
        around = max(terms, about[AROUND, row])
        found = bound_of(rest, joined(top, divisor), around, terms, sizes[WIDTH], every)
        bounds[b, h * rows + row] = found
        worst = max(worst, found)
    if epsilon <= 0 or worst <= epsilon:
        return head[DONE]
    return min(head[DONE] + one[STEP], one[UNITS])


@part
def choose(phase, pair, arrays, one, segments, limits, work):
    """Rank the units of a head, if they are not yet, and choose the first of them, or more."""
    scores, upper, places, ranks, numbers_at, chosen, counts, heads, about, reach, _ = work
    sizes = arrays[0]
    rows, head, count = sizes[GROUP], heads[pair], one[PLACES]
    if phase == FIRST_CHOSEN:
        dense = np.empty(rows, np.float64)
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
        shares = np.empty(upper.shape[2], np.float32)
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
    absolute = np.zeros((ROWS, most), np.float32)
    places = MOST + WORD if phase == READ else 0
    squeezed, logits = room_for_chosen(most, places // WORD), np.zeros((rows, places), np.float32)
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
                attend_item(piece, arrays, books, rooms)
                if first >= 0:
                    reach_of(first, items[piece, 2], units, widths[0], ranges, reach[piece], room)
        else:
            one = sequences[piece // sizes[HEADS]]
            if phase == BOUNDED:
                heads[piece, STOP] = bound(piece, arrays, one, heads[piece], about[piece], limits[EPSILON], bounds)
            else:
                heads[piece, FRESH] = phase == FIRST_CHOSEN or heads[piece, STOP] > heads[piece, DONE]
                choose(phase, piece, arrays, one, segments, limits, work)


@c_function("void(voidptr)")
def attend_few_at(data):
    """`attend_few`, as threads call it: with the addresses of the arrays, and their sizes."""
    given = carray(data, (GIVEN,), np.int64)
    arrays = arrays_at(given)
    pairs, batch, rows, wide, count = given[0], given[1], given[2], given[3], given[5]
    heads, columns, tokens = pairs // batch, given[MOST_PLACES], given[MOST_TOKENS]
    group = arrays[0][GROUP]
    work = (
        numbers(given[AT_SCORES], (pairs, rows, columns)),
        numbers(given[AT_UPPER], (pairs, rows, columns)),
        integers(given[AT_PLACES], (pairs, tokens)),
        carray(pointer(given[AT_RANKS]), (pairs, tokens), np.int16),
        integers(given[AT_NUMBERS], (pairs, BUCKETS)),
        carray(pointer(given[AT_CHOSEN]), (pairs, columns // WORD), np.uint64),
        integers(given[AT_COUNTS], (pairs, columns // WORD)),
        integers(given[AT_HEADS], (pairs, OF_HEAD)),
        carray(pointer(given[AT_ABOUT]), (pairs, ABOUT, rows), np.float64),
        numbers(given[AT_REACH], (count, wide)),
        carray(pointer(given[AT_BOUNDS]), (batch, heads * group), np.float64),
    )
    attend_few(
        given[PHASE],
        arrays,
        given[16],
        integers(given[AT_SEQUENCES], (batch, forms.OF_SEQUENCE)),
        integers(given[AT_SEGMENTS], (given[SEGMENTS], OF_SEGMENT)),
        integers(given[AT_FIRSTS], (given[6],)),
        numbers(given[AT_RANGES], (3, 9, CELLS)),
        carray(pointer(given[AT_LIMITS]), (2,), np.float64),
        work,
    )
