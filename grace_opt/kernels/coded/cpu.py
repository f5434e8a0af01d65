r"""Attention of a few query rows over coded tokens on the CPU: keys and values are read where they lie.

`grace_opt.kernels.coded.host` calls it. A query is multiplied by the basis once, so that its products with coordinates
are logits:

.. math:: q \cdot k = q' \cdot x = \sum_j q'_j m_j + \sum_j q'_j s_j\, l(c_j)

with means m and scales s per channel and class and the numbers l(c) that codes stand for. Sums of values are made in
coordinates too, and multiplied by the basis of the values at the end. A *unit* is a class of tokens of one head; the
columns of a head's units are cut into runs, and an item is one run, or the dense tokens of one head. Each item has its
own maximum, sum and products, which `join` combines: the result does not depend on the number of threads.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), for splitting along the tokens.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from .._shared.jit import c_function, jit
from .._shared.lanes import add_one, exp2, load, pointer, spread, store, total
from ..decode.cpu import LEAST, NOTHING, ZERO, add_mask, cap, hide_bool, read_queries, turn_into_shares
from ..decode.cpu.logits import logits_by_token
from ..decode.cpu.rows import BYTES, WHOLE
from ..decode.cpu.values import add_values as add_dense_values
from ..decode.forms import ADDITIVE, BOOL, CAUSAL
from .channels import copy_rest, part_of, sort_channels
from .forms import COUNT, END, FIELDS, KEYS, LANES, NEWEST, ROWS, VALUES
from .products import PAIR, PAIR_STEP, add_logits, add_values

#: Most bits of a number: planes of a channel.
MOST_PLANES = 8
#: Numbers in a row of the codebooks, in bytes.
BOOK = 256 * BYTES
#: Entries of `places`: address and four strides, in bytes, of the mask over the tail, the queries, and the tail.
MASK, QUERY, TAIL_KEYS, TAIL_VALUES = 0, 5, 10, 15


@jit
def prepare(places, sizes, bases, inner, queries):
    """Scale the queries of each group, ``queries[0]``, and multiply them by the basis of the keys, ``queries[1]``."""
    heads, group, length, width = sizes[0], sizes[1], sizes[2], sizes[3]
    step = queries.shape[3] * BYTES
    for pair in range(queries.shape[1]):
        full, turned, basis = queries[0, pair], queries[1, pair], bases[pair, 0]
        at = places[QUERY] + pair // heads * places[QUERY + 1] + pair % heads * group * places[QUERY + 2]
        steps = places[QUERY + 2], places[QUERY + 3], places[QUERY + 4]
        read_queries(at, *steps, group * length, length, width, inner, full)
        for row in range(0, full.shape[0], ROWS):
            if basis:
                four, out = full[row].ctypes.data, turned[row].ctypes.data
                logits_by_token(four, step, basis, width * BYTES, width, width, out, step)
            else:
                turned[row : row + ROWS] = full[row : row + ROWS]


@njit(nogil=True)
def safe_part(count, offset, stride, behind, end):
    """How many of `count` tokens, from a byte of each plane on, are read in pairs of vectors without leaving memory.

    All, with what stands in the next planes, unless the unit's last plane is the last of all.
    """
    beyond = offset + (count + PAIR - 1) // PAIR * PAIR_STEP - stride
    return (count + PAIR - 1) // PAIR * PAIR if behind + beyond <= end else count // PAIR * PAIR


@njit(nogil=True)
def attend_coded(units, limits, widths, turned, books, softcap, outer, logits, newest, state, room):
    """Attend with four rows to a run of one head's columns.

    Parameters
    ----------
    units : (all units, FIELDS) int64
    limits : four int
        The first unit of the head, the one after its last, the run's first column and the one after its last.
    widths : (int, int)
        Channels of keys and of values.
    turned : (4, …) float32
        Queries in the coordinates of the keys.
    newest : (4, …) float32
        Written: logits of tokens among the newest.
    state : (4,), (4,), (4, …)
        Written: maxima, sums and products of the rows.
    room
        See `make_room`.
    """
    largest, sums, products = state
    levels, order, addresses, scales, means, starts, bits, bits_at, scaled, totals = room
    query_step, logit_step, total_step = scaled.shape[1] * BYTES, logits.shape[1] * BYTES, ROWS * BYTES
    (width, value_width), (first, last, start, stop) = widths, limits
    constants = np.zeros(ROWS, np.float32)
    column = place = 0
    for unit in range(first, last):
        count = units[unit, COUNT]
        a, b = part_of(column, count, start, stop)
        column += count
        if a == b:
            continue
        stride, end = (count + 7) // 8, place + (b - a + PAIR - 1) // PAIR * PAIR
        given = units[unit, KEYS:], stride, width
        behind = sort_channels(*given, levels, order, addresses, scales, means, starts)
        whole = safe_part(b - a, a // 8, stride, behind, units[unit, KEYS + END])
        for row in range(ROWS):
            constants[row] = ZERO
            for i in range(width):
                constants[row] += turned[row, i] * means[i]
                scaled[row, i] = turned[row, order[i]] * scales[i]
        to = logits.ctypes.data + place * BYTES
        four = scaled.ctypes.data, query_step, constants, books, BOOK
        if whole:
            add_logits(addresses.ctypes.data, starts, a // 8, stride, whole, *four, to, logit_step)
        if whole < b - a:
            copy_rest(addresses, starts, (a + whole) // 8, stride, (b - a - whole + 7) // 8, bits, bits_at)
            add_logits(bits_at.ctypes.data, starts, 0, PAIR_STEP, PAIR, *four, to + whole * BYTES, logit_step)
        for row in range(ROWS):
            line = logits[row]
            if softcap:
                cap(line[place:end], outer)
            for t in range(place + b - a, end):
                line[t] = NOTHING
            if units[unit, NEWEST] >= 0:
                to_newest = newest[row, units[unit, NEWEST] + a :]
                for t in range(b - a):
                    to_newest[t] = line[place + t]
        place = end
    for row in range(ROWS):
        largest[row], _, sums[row] = turn_into_shares(logits[row], place, NOTHING)
    column = place = 0
    for unit in range(first, last):
        count = units[unit, COUNT]
        a, b = part_of(column, count, start, stop)
        column += count
        if a == b:
            continue
        stride, end = (count + 7) // 8, place + (b - a + PAIR - 1) // PAIR * PAIR
        given = units[unit, VALUES:], stride, value_width
        behind = sort_channels(*given, levels, order, addresses, scales, means, starts)
        whole = safe_part(b - a, a // 8, stride, behind, units[unit, VALUES + END])
        totals[:] = ZERO
        four = logit_step, books, BOOK, totals.ctypes.data
        shares = logits.ctypes.data + place * BYTES
        if whole:
            add_values(addresses.ctypes.data, starts, a // 8, stride, whole, shares, *four)
        if whole < b - a:
            copy_rest(addresses, starts, (a + whole) // 8, stride, (b - a - whole + 7) // 8, bits, bits_at)
            add_values(bits_at.ctypes.data, starts, 0, PAIR_STEP, PAIR, shares + whole * BYTES, *four)
        for row in range(ROWS):
            every = spread(ZERO)
            at = logits[row].ctypes.data
            for t in range(at + place * BYTES, at + end * BYTES, WHOLE):
                every = every + load(t)
            share = total(every)
            for c in range(value_width):
                products[row, c] += share * means[c]
            for i in range(value_width):
                products[row, order[i]] += totals[i, row] * scales[i]
        place = end


@njit(nogil=True)
def attend_dense(dense, of_tail, sizes, known, first, queries, hidden, softcap, outer, logits, newest, state):
    """Attend with four rows, of which `first` is the number, to one head's dense tokens: sinks, then the tail.

    `of_tail` has address and step of the tail's keys and values; `known` is the number of the last dense tokens that
    are among the newest; `hidden` has the kind of mask, the rows' addresses in it, its step, the rows' last columns.
    """
    largest, sums, products = state
    sinks, tail = dense[0], sizes[8]
    width, value_width, rows = sizes[3], sizes[4], sizes[1] * sizes[2]
    kind, masks, mask_step, last_columns = hidden
    to, four = logits.ctypes.data, queries.ctypes.data
    query_step, logit_step = queries.shape[1] * BYTES, logits.shape[1] * BYTES
    if sinks:
        logits_by_token(four, query_step, dense[1], dense[2], width, sinks, to, logit_step)
    logits_by_token(four, query_step, of_tail[0], of_tail[1], width, tail, to + sinks * BYTES, logit_step)
    for row in range(min(ROWS, rows - first)):
        line = logits[row]
        if softcap:
            cap(line[: (sinks + tail + LANES - 1) // LANES * LANES], outer)
        if kind == CAUSAL:
            for unseen in range(sinks + last_columns[first + row] + 1, sinks + tail):
                line[unseen] = LEAST
        elif kind == BOOL:
            hide_bool(line[sinks:], tail, masks[first + row], mask_step)
        elif kind == ADDITIVE:
            add_mask(line[sinks:], tail, masks[first + row], mask_step)
        for t in range(known):
            newest[row, sizes[7] - known + t] = line[sinks + tail - known + t]
        largest[row], _, sums[row] = turn_into_shares(line, sinks + tail, NOTHING)
    out, out_step = products.ctypes.data, products.shape[1] * BYTES
    if sinks:
        add_dense_values(to, logit_step, dense[3], dense[4], value_width, sinks, out, out_step)
    add_dense_values(to + sinks * BYTES, logit_step, of_tail[2], of_tail[3], value_width, tail, out, out_step)


@njit(nogil=True)
def make_room(width):
    """What `attend_coded` needs besides: for each channel, index of its width, channel and address by widths, scale,
    mean; starts of widths; a copy of the last tokens' bits, and its addresses; scaled queries; sums of four rows."""
    return (
        np.zeros(width, np.int64),
        np.zeros(width, np.int64),
        np.zeros(width, np.int64),
        np.zeros(width, np.float32),
        np.zeros(width, np.float32),
        np.zeros(9, np.int64),
        np.zeros(width * MOST_PLANES * PAIR_STEP, np.uint8),
        np.zeros(width, np.int64),
        np.zeros((ROWS, width), np.float32),
        np.zeros((width, ROWS), np.float32),
    )


# Plain loops instead of operations on whole arrays, here and below: numba takes seconds to compile each of those.
@jit
def attend(
    taken, places, sizes, items, units, dense, more, books, softcap, outer, queries, newest, ends, products
):  # fmt: skip
    """Process the items not taken yet; write to their rows of maxima, sums and products.

    Threads that call this on the same arrays share the items; a slow thread takes fewer.

    Parameters
    ----------
    taken : (1,) int64
        Number of items taken so far.
    places : (20,) int64
        See `MASK`.
    sizes : (9,) int64
        KV heads, query heads of each, new tokens, widths of keys and values, kind of mask, room for logits, newest
        tokens, the tail's tokens.
    items, units, dense : int64
        See `grace_opt.kernels.coded.table.CodedSequence`.
    more : (B,) int64
        How many of the sinks are among the newest tokens.
    books : (9, 256) float32
    softcap, outer : bool, float32
        As for `grace_opt.kernels.decode.cpu.attend`.
    queries : (2, pairs, rows padded, width padded) float32
        What `prepare` writes.
    newest : (pairs, rows padded, newest tokens padded) float32
        At first minus infinity; written: logits of the newest tokens.
    ends : (2, items, rows padded) float32
        Written: maxima and sums.
    products : (items, rows padded, width of values padded) float32
        At first zero.
    """
    heads, group, length, width, value_width, kind = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    rows, tail, book = group * length, sizes[8], books.ctypes.data
    logits, room = np.zeros((ROWS, sizes[6]), np.float32), make_room(max(width, value_width))
    masks, last_columns = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    while True:
        item = add_one(taken)
        if item >= items.shape[0]:
            return
        pair, is_dense = items[item, 0], items[item, 1] < 0
        b, h = pair // heads, pair % heads
        for row in range(rows):
            head, new = h * group + row // length, row % length
            masks[row] = places[MASK] + b * places[MASK + 1] + head * places[MASK + 2] + new * places[MASK + 3]
            last_columns[row] = tail - length + new
        for row in range(0, rows, ROWS):
            upto = row + ROWS
            own = ends[0, item, row:upto], ends[1, item, row:upto], products[item, row:upto]
            written = newest[pair, row:upto]
            if is_dense:
                hidden = kind, masks, places[MASK + 4], last_columns
                of_tail = (
                    places[TAIL_KEYS] + b * places[TAIL_KEYS + 1] + h * places[TAIL_KEYS + 2],
                    places[TAIL_KEYS + 3],
                    places[TAIL_VALUES] + b * places[TAIL_VALUES + 1] + h * places[TAIL_VALUES + 2],
                    places[TAIL_VALUES + 3],
                )
                known = min(tail + more[b], sizes[7], tail + dense[pair, 0])
                four = queries[0, pair, row:upto]
                attend_dense(
                    dense[pair], of_tail, sizes, known, row, four, hidden, softcap, outer, logits, written, own
                )
            else:
                limits = items[item, 1], items[item, 2], items[item, 3], items[item, 4]
                four, widths = queries[1, pair, row:upto], (width, value_width)
                attend_coded(units, limits, widths, four, book, softcap, outer, logits, written, own, room)


@njit(nogil=True)
def integers(at, shape):
    """An array of int64 at an address."""
    return carray(pointer(at), shape, np.int64)


@njit(nogil=True)
def numbers(at, shape):
    """An array of float32 at an address."""
    return carray(pointer(at), shape, np.float32)


@c_function("void(voidptr)")
def attend_in_team(data):
    """`attend`, as a team of threads calls it: with addresses of arrays, and numbers that say how large they are."""
    given = carray(data, (21,), np.int64)
    pairs, rows, wide, news, count = given[13], given[14], given[15], given[16], given[17]
    scales = numbers(given[8], (2,))
    attend(
        integers(given[0], (1,)),
        integers(given[1], (20,)),
        integers(given[2], (9,)),
        integers(given[3], (count, 5)),
        integers(given[4], (given[18], FIELDS)),
        integers(given[5], (pairs, 5)),
        integers(given[6], (given[20],)),
        numbers(given[7], (9, 256)),
        scales[0] != 0,
        scales[1],
        numbers(given[9], (2, pairs, rows, wide)),
        numbers(given[10], (pairs, rows, news)),
        numbers(given[11], (2, count, rows)),
        numbers(given[12], (count, rows, given[19])),
    )


@jit
def join(sizes, items, bases, ends, products, newest, output, received):
    """Combine the items of each pair; add up the attention that the newest tokens receive.

    `output` is (B, L, H_q, d_v); `received` (pairs, 3, newest tokens padded): sums over queries of p and p², each the mean of
    the group's heads, and the number of queries that saw the token. Parameters otherwise as in `attend`.
    """
    heads, group, length, width = sizes[0], sizes[1], sizes[2], sizes[4]
    rows, padded, step = group * length, products.shape[1], products.shape[2] * BYTES
    tops, divisors = np.zeros(padded, np.float32), np.zeros(padded, np.float32)
    coded, dense = np.zeros(products.shape[1:], np.float32), np.zeros(products.shape[1:], np.float32)
    largest, sums, first = ends[0], ends[1], 0
    for pair in range(newest.shape[0]):
        last = first
        while last < items.shape[0] and items[last, 0] == pair:
            last += 1
        for row in range(rows):
            top, divisor = largest[first, row], ZERO
            for item in range(first + 1, last):
                top = max(top, largest[item, row])
            for c in range(width):
                coded[row, c] = dense[row, c] = ZERO
            for item in range(first, last):
                weight = np.float32(2.0) ** (largest[item, row] - top)
                divisor += weight * sums[item, row]
                of_kind = dense if items[item, 1] < 0 else coded
                for c in range(width):
                    of_kind[row, c] += weight * products[item, row, c]
            tops[row], divisors[row] = top, divisor
        basis = bases[pair, 1]
        for row in range(0, rows, ROWS):
            if basis:
                at, out = coded[row].ctypes.data, dense[row].ctypes.data
                add_dense_values(at, step, basis, width * BYTES, width, width, out, step)
            else:
                dense[row : row + ROWS] += coded[row : row + ROWS]
        b, share = pair // heads, np.float32(1.0) / np.float32(group)
        for row in range(rows):
            new, head = row % length, pair % heads * group + row // length
            for c in range(width):
                output[b, new, head, c] = dense[row, c] / divisors[row]
            at, to = newest[pair, row].ctypes.data, received[pair, 0].ctypes.data
            top, factor, part = spread(tops[row]), spread(np.float32(1.0) / divisors[row]), spread(share)
            squares = received[pair, 1].ctypes.data - to
            for place in range(0, newest.shape[2] * BYTES, WHOLE):
                p = exp2(load(at + place) - top) * factor
                store(to + place, load(to + place) + part * p)
                store(to + squares + place, load(to + squares + place) + part * p * p)
        for t in range(sizes[7]):
            received[pair, 2, t] = min(sizes[7] - t, length)
        first = last
