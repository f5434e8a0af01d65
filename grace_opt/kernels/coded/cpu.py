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
from .forms import COUNT, FIELDS, KEYS, LANES, NEWEST, ROWS, VALUES
from .products import PAIR, PAIR_STEP, add_logits, add_values

#: Most bits of a number: planes of a channel.
MOST_PLANES = 8
#: Numbers in a row of the codebooks, in bytes.
BOOK = 256 * BYTES


@jit
def prepare(places, sizes, inner, full, turned):
    """Scale the queries of each group, and multiply them by the basis: rows of `full` and of `turned`.

    `places` has the queries' address and strides, then for each pair of sequence and KV head the addresses of the bases
    of keys and values, or 0; `sizes` is (heads, group, new tokens, width).
    """
    heads, group, length, width = sizes[0], sizes[1], sizes[2], sizes[3]
    step = full.shape[2] * BYTES
    for pair in range(full.shape[0]):
        at = places[0] + pair // heads * places[1] + pair % heads * group * places[2]
        read_queries(at, places[2], places[3], places[4], group * length, length, width, inner, full[pair])
        basis = places[5 + 2 * pair]
        for row in range(0, full.shape[1], ROWS):
            if basis == 0:
                turned[pair, row : row + ROWS] = full[pair, row : row + ROWS]
            else:
                four, out = full[pair, row].ctypes.data, turned[pair, row].ctypes.data
                logits_by_token(four, step, basis, width * BYTES, width, width, out, step)


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
        stride, whole = (count + 7) // 8, (b - a) // PAIR * PAIR
        sort_channels(units[unit, KEYS:], stride, width, levels, order, addresses, scales, means, starts)
        for row in range(ROWS):
            constants[row] = ZERO
            for i in range(width):
                constants[row] += turned[row, i] * means[i]
                scaled[row, i] = turned[row, order[i]] * scales[i]
        to = logits.ctypes.data + place * BYTES
        given = scaled.ctypes.data, query_step, constants, books, BOOK
        if whole:
            add_logits(addresses.ctypes.data, starts, a // 8, stride, whole, *given, to, logit_step)
        if whole < b - a:
            copy_rest(addresses, starts, (a + whole) // 8, stride, (b - a - whole + 7) // 8, bits, bits_at)
            add_logits(bits_at.ctypes.data, starts, 0, PAIR_STEP, PAIR, *given, to + whole * BYTES, logit_step)
        end = place + (b - a + PAIR - 1) // PAIR * PAIR
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
        stride, whole = (count + 7) // 8, (b - a) // PAIR * PAIR
        sort_channels(units[unit, VALUES:], stride, value_width, levels, order, addresses, scales, means, starts)
        totals[:] = ZERO
        given = logit_step, books, BOOK, totals.ctypes.data
        shares = logits.ctypes.data + place * BYTES
        if whole:
            add_values(addresses.ctypes.data, starts, a // 8, stride, whole, shares, *given)
        if whole < b - a:
            copy_rest(addresses, starts, (a + whole) // 8, stride, (b - a - whole + 7) // 8, bits, bits_at)
            add_values(bits_at.ctypes.data, starts, 0, PAIR_STEP, PAIR, shares + whole * BYTES, *given)
        end = place + (b - a + PAIR - 1) // PAIR * PAIR
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
def attend_dense(dense, sizes, first, queries, hidden, softcap, outer, logits, newest, state):
    """Attend with four rows, of which `first` is the number, to one head's dense tokens: sinks, then the tail.

    `dense` has the addresses and steps of sink keys and values and of the tail's, and their numbers; `hidden` the kind
    of mask, the rows' addresses in it, its step, and the rows' last columns.
    """
    largest, sums, products = state
    sinks, tail = dense[0], dense[1]
    width, value_width, rows = sizes[3], sizes[4], sizes[1] * sizes[2]
    kind, masks, mask_step, last_columns = hidden
    to, four = logits.ctypes.data, queries.ctypes.data
    query_step, logit_step = queries.shape[1] * BYTES, logits.shape[1] * BYTES
    if sinks:
        logits_by_token(four, query_step, dense[2], dense[3], width, sinks, to, logit_step)
    logits_by_token(four, query_step, dense[6], dense[7], width, tail, to + sinks * BYTES, logit_step)
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
        known = min(sizes[7], dense[10])
        for t in range(known):
            newest[row, sizes[7] - known + t] = line[sinks + tail - known + t]
        largest[row], _, sums[row] = turn_into_shares(line, sinks + tail, NOTHING)
    out, out_step = products.ctypes.data, products.shape[1] * BYTES
    if sinks:
        add_dense_values(to, logit_step, dense[4], dense[5], value_width, sinks, out, out_step)
    add_dense_values(to + sinks * BYTES, logit_step, dense[8], dense[9], value_width, tail, out, out_step)


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
def attend(taken, places, sizes, items, units, dense, books, softcap, outer, full, turned, newest, state):
    """Process the items not taken yet; write to their rows of maxima, sums and products.

    Threads that call this on the same arrays share the items; a slow thread takes fewer.

    Parameters
    ----------
    taken : (1,) int64
        Number of items taken so far.
    places : (4,) int64
        Address of the mask over the tail, and its strides: batch, head, row; then that of columns.
    sizes : (8,) int64
        KV heads, query heads of each, new tokens, widths of keys and values, kind of mask, room for logits,
        newest tokens.
    items : (all items, 5) int64
        Pair of sequence and head; limits of a run as in `attend_coded`, or -1 as the first: dense tokens.
    units : (all units, FIELDS) int64
    dense : (pairs, 11) int64
        Numbers of sinks and of the tail's tokens; addresses and steps of keys and values of each; how many of the last
        ones are among the newest.
    books : (9, 256) float32
    softcap, outer : bool, float32
        As for `grace_opt.kernels.decode.cpu.attend`.
    full, turned : (pairs, rows padded, width padded) float32
    newest : (pairs, rows padded, newest tokens padded) float32
        At first minus infinity; written: logits of the newest tokens.
    state : (items, rows padded), twice, and (items, rows padded, width of values padded), float32
        Maxima, sums, and products, at first zero.
    """
    heads, group, length, width, value_width, kind = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    rows, (largest, sums, products) = group * length, state
    logits, room = np.zeros((ROWS, sizes[6]), np.float32), make_room(max(width, value_width))
    masks, last_columns = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    while True:
        item = add_one(taken)
        if item >= items.shape[0]:
            return
        pair = items[item, 0]
        b, h, tail = pair // heads, pair % heads, dense[pair, 1]
        for row in range(rows):
            masks[row] = places[0] + b * places[1] + (h * group + row // length) * places[2] + row % length * places[3]
            last_columns[row] = tail - length + row % length
        for row in range(0, rows, ROWS):
            upto = row + ROWS
            own = largest[item, row:upto], sums[item, row:upto], products[item, row:upto]
            written = newest[pair, row:upto]
            if items[item, 1] < 0:
                hidden = kind, masks, places[4], last_columns
                attend_dense(dense[pair], sizes, row, full[pair, row:upto], hidden, softcap, outer, logits, written, own)
            else:
                limits = items[item, 1], items[item, 2], items[item, 3], items[item, 4]
                queries, widths = turned[pair, row:upto], (width, value_width)
                attend_coded(
                    units, limits, widths, queries, books.ctypes.data, softcap, outer, logits, written, own, room
                )


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
    given = carray(data, (20,), np.int64)
    pairs, rows, wide, news, count, all_units = given[13], given[14], given[15], given[16], given[17], given[18]
    scales = numbers(given[7], (2,))
    attend(
        integers(given[0], (1,)),
        integers(given[1], (5,)),
        integers(given[2], (8,)),
        integers(given[3], (count, 5)),
        integers(given[4], (all_units, FIELDS)),
        integers(given[5], (pairs, 11)),
        numbers(given[6], (9, 256)),
        scales[0] != 0,
        scales[1],
        numbers(given[8], (pairs, rows, wide)),
        numbers(given[9], (pairs, rows, wide)),
        numbers(given[10], (pairs, rows, news)),
        (
            numbers(given[11], (count, rows)),
            numbers(given[11] + count * rows * BYTES, (count, rows)),
            numbers(given[12], (count, rows, given[19])),
        ),
    )


@jit
def join(places, sizes, items, largest, sums, products, newest, output, received):
    """Combine the items of each pair; add up the attention that the newest tokens receive.

    `output` is (B, L, H_q, d_v); `received` (pairs, 2, newest tokens padded): sums over queries of p and p², each the mean of
    the group's heads. Parameters otherwise as in `prepare` and `attend`.
    """
    heads, group, length, width = sizes[0], sizes[1], sizes[2], sizes[4]
    rows, padded, step = group * length, products.shape[1], products.shape[2] * BYTES
    tops, divisors = np.zeros(padded, np.float32), np.zeros(padded, np.float32)
    coded, dense = np.zeros(products.shape[1:], np.float32), np.zeros(products.shape[1:], np.float32)
    first = 0
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
        basis = places[6 + 2 * pair]
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
        first = last
