"""Attention of one new query over few of the stored tokens on the CPU: scores, choice, attention, bound in one loop.

`grace_opt.kernels.reading.host` calls it; `reference` defines the result. An item is one KV head of one sequence. Its
units are scored for the whole group of query heads, sorted by counting, and marked; marked tokens are copied, a block
at a time, to where the decoding kernel's loops (`grace_opt.kernels.decode.cpu`) read them, in the order in which they
lie. Logits are in powers of two. Bounds are joined in float64 with what `certificate` allows for rounding.
"""

from __future__ import annotations

import math

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np
from numba.np.numpy_support import carray

from .._shared.jit import c_function, part
from .._shared.lanes import (
    add_one,
    ask_for,
    exp2,
    greater,
    greatest,
    load,
    load_byte,
    load_one,
    load_short,
    load_some,
    multiply_add,
    pointer,
    spread,
    store,
    store_some,
    total,
)
from ..decode.cpu import BLOCK, LOG2E, NOTHING, address, attend_segment, gather, integers, numbers, read_queries
from ..decode.cpu.logits import logits_by_token
from ..decode.cpu.rows import BYTES, WHOLE
from ..decode.forms import BOOL, BY_TOKEN, LANES, ROWS
from .forms import BESIDES, BUCKETS, MARGIN, ROUNDS, STEPS

#: Rows of `places`; the columns are address and strides (batch, head, token or row, channel), in bytes.
QUERY, KEPT, SINK_KEYS, OLD_KEYS, TAIL_KEYS, OLD_VALUES, TAIL_VALUES, MASK, LOWER, UPPER, COUNTS, REACH = range(12)
#: Entries of `sizes`.
HEADS, GROUP, WIDTH, KEPT_COUNT, VALUE_WIDTH, SINKS, OLD, TAIL, UNITS, SIZE, FIRST, LEAD, KIND = range(13)
#: Entries of `factors`.
SCALE, EPSILON, TOP_P = range(3)
ZERO, INFINITE, STEP = np.float32(0.0), np.float32(np.inf), np.float32(STEPS / math.log2(math.e))
PRECISION, BITS = 2.0**-23, math.log2(math.e)
#: Tokens ahead of the copied one that are asked for.
AHEAD = 4
NO_FORM = (0, 0, 0, 0, 0, False)


@part
def raise_reach(at, step, count, width, reach):
    """Raise the entries of `reach` to the largest absolute number of each channel."""
    to = reach.ctypes.data
    for c in range(0, width, LANES):
        best, left = load(to + c * BYTES), min(LANES, width - c)
        for t in range(count):
            x = load_some(at + t * step + c * BYTES, left)
            best = greater(best, greater(x, spread(ZERO) - x))
        store(to + c * BYTES, best)


@part
def terms_of(query, reach, width):
    """What the terms of a product add up to at most."""
    found = 0.0
    for c in range(width):
        found += abs(np.float64(query[c])) * np.float64(reach[c])
    return found


@part
def log_sum(row, count, shares):
    """Logarithm, in powers of two, of a row's sum of powers, whose shares of the largest are written.

    The row has room for whole vectors. A row with something that is not a number has no number for its sum.
    """
    stop = (count + LANES - 1) // LANES * LANES
    for u in range(count, stop):
        row[u] = NOTHING
    at, to, best = row.ctypes.data, shares.ctypes.data, spread(NOTHING)
    for place in range(0, stop * BYTES, WHOLE):
        best = greater(best, load(at + place))
    top = greatest(best)
    if top == NOTHING:
        for u in range(count):
            if row[u] != row[u]:
                return np.nan, INFINITE
        return np.float64(top), top
    shift, sums = spread(top), spread(ZERO)
    for place in range(0, stop * BYTES, WHOLE):
        share = exp2(load(at + place) - shift)
        store(to + place, share)
        sums = sums + share
    return np.float64(top) + math.log2(np.float64(total(sums))), top


@part
def estimate_pages(queries, rows, places, sizes, b, h, expected, bounds, half):
    """Fill the pages' bounds, which are the scores too."""
    width, units = sizes[KEPT_COUNT], sizes[UNITS]
    step, out_step = queries.shape[1] * BYTES, expected.shape[1] * BYTES
    for side in range(2):
        for row in range(rows):
            for c in range(width):
                x = queries[row, c]
                half[row, c] = (x if x > 0 or x != x else ZERO) if side == 0 else (x if x < 0 else ZERO)
        place = places[UPPER if side == 0 else LOWER]
        out = expected if side == 0 else bounds
        for first in range(0, rows, ROWS):
            four, to = half.ctypes.data + first * step, out.ctypes.data + first * out_step
            logits_by_token(four, step, address(place, b, h), place[3], width, units, to, out_step)
    counts = places[COUNTS, 0] + b * places[COUNTS, 1]
    for u in range(units):
        number = load_short(counts + u * places[COUNTS, 3])
        more = np.float32(math.log2(number)) if number > 0 else NOTHING
        for row in range(rows):
            expected[row, u] = (expected[row, u] + bounds[row, u]) + more
            bounds[row, u] = expected[row, u]


@part
def estimate_tokens(queries, rows, places, sizes, b, h, expected, bounds, terms):
    """Fill the tokens' scores and bounds; add to `terms` what the terms of the bounds have besides."""
    width, lead, units = sizes[KEPT_COUNT], sizes[LEAD], sizes[UNITS]
    step, out_step = queries.shape[1] * BYTES, expected.shape[1] * BYTES
    place = places[OLD_KEYS]
    for first in range(0, rows, ROWS):
        four, to = queries.ctypes.data + first * step, expected.ctypes.data + first * out_step
        logits_by_token(four, step, address(place, b, h), place[3], lead, units, to, out_step)
    norms, mean = address(places[LOWER], b, h), address(places[UPPER], b, h)
    counts = places[COUNTS, 0] + b * places[COUNTS, 1]
    largest = spread(ZERO)
    for u in range(0, units, LANES):
        largest = greater(largest, load_some(norms + u * BYTES, min(LANES, units - u)))
    longest = np.float64(greatest(largest))
    for row in range(rows):
        constant, square = 0.0, 0.0
        for c in range(lead, width):
            q = np.float64(queries[row, c])
            constant += q * np.float64(load_one(mean + (c - lead) * BYTES))
            square += q * q
        length = np.float32(math.sqrt(square))
        shift, factor = spread(np.float32(constant)), spread(length)
        at, to = expected[row].ctypes.data, bounds[row].ctypes.data
        for u in range(0, units, LANES):
            score = load(at + u * BYTES) + shift
            store(at + u * BYTES, score)
            store(to + u * BYTES, multiply_add(factor, load_some(norms + u * BYTES, min(LANES, units - u)), score))
        u = 0
        while u < units and load_short(counts + u * places[COUNTS, 3]) == 0:  # padding comes first
            expected[row, u] = bounds[row, u] = NOTHING
            u += 1
        terms[row] = 2 * terms[row] + np.float64(length) * longest


@part
def hide_units(rows, places, sizes, masks, expected, bounds):
    """Write minus infinity for units of which the mask shows no token."""
    stop = 0
    for u in range(sizes[UNITS]):
        start, stop = stop, min(sizes[FIRST] + u * sizes[SIZE], sizes[OLD])
        for row in range(rows):
            seen = 0
            for t in range(start, stop):
                seen += load_byte(masks[row] + (sizes[SINKS] + t) * places[MASK, 4]) != 0
            if seen == 0:
                expected[row, u] = bounds[row, u] = NOTHING


@part
def sort_units(rows, units, expected, sums, score, buckets, order):
    """Fill the order in which units are read, as `reference.reading_order` does."""
    to, highest = score.ctypes.data, spread(NOTHING)
    for u in range(0, units, LANES):
        best = spread(NOTHING)
        for row in range(rows):
            x = load(expected[row].ctypes.data + u * BYTES)
            best = greater(best, x - spread(np.float32(sums[row])) if rows > 1 else x)
        store(to + u * BYTES, best)
        highest = greater(highest, best)
    top = greatest(highest)
    buckets[:] = 0
    for u in range(units):
        below = (top - score[u]) * STEP
        bucket = 0 if below != below else (np.int64(below) if below < BUCKETS - 1 else BUCKETS - 1)
        score[u] = np.float32(bucket)
        buckets[bucket + 1] += 1
    for n in range(BUCKETS):
        buckets[n + 1] += buckets[n]
    for u in range(units):
        bucket = np.int64(score[u])
        order[buckets[bucket]] = u
        buckets[bucket] += 1


@part
def expected_enough(rows, units, sums, tops, shares, dense, order, top_p, least):
    """How many units have the wanted share of the attention that is expected, with the dense tokens."""
    count = least
    for row in range(rows):
        if not -np.inf < sums[row] < np.inf:
            continue
        units_sum, top = 2.0 ** (sums[row] - np.float64(tops[row])), np.float64(tops[row])
        wanted = units_sum - (1.0 - top_p) * (units_sum + 2.0 ** (dense[row] - top))
        done, share = 0, 0.0
        while share < wanted and done < units:
            share += np.float64(shares[row, order[done]])
            done += 1
        count = max(count, done)
    return count


@part
def read_tokens(keys, key_step, values, value_step, tokens, count, width, value_width, key_room, value_room):
    """Copy tokens to the rooms, one after the other."""
    key_to, value_to = key_room.ctypes.data, value_room.ctypes.data
    key_row, value_row = key_room.shape[1] * BYTES, value_room.shape[1] * BYTES
    full, rest = width - width % LANES, width % LANES
    value_full, value_rest = value_width - value_width % LANES, value_width % LANES
    for i in range(count):
        ahead = tokens[min(i + AHEAD, count - 1)]
        for c in range(0, width * BYTES, 64):
            ask_for(keys + ahead * key_step + c)
        for c in range(0, value_width * BYTES, 64):
            ask_for(values + ahead * value_step + c)
        at, to = keys + tokens[i] * key_step, key_to + i * key_row
        for c in range(0, full * BYTES, WHOLE):
            store(to + c, load(at + c))
        if rest:
            store_some(to + full * BYTES, load_some(at + full * BYTES, rest), rest)
        at, to = values + tokens[i] * value_step, value_to + i * value_row
        for c in range(0, value_full * BYTES, WHOLE):
            store(to + c, load(at + c))
        if value_rest:
            store_some(to + value_full * BYTES, load_some(at + value_full * BYTES, value_rest), value_rest)


@part
def read_units(queries, rows, places, sizes, b, h, masks, order, start, stop, marks, bounds, rooms, state):
    """Attend to the tokens of the units `start` to `stop` of an order; return how many real ones they have."""
    mask_room, tokens = rooms[2], rooms[3]
    size, first, old = sizes[SIZE], sizes[FIRST], sizes[OLD]
    counts, real = places[COUNTS, 0] + b * places[COUNTS, 1], 0
    for i in range(start, stop):
        marks[order[i]] = 1
        for row in range(rows):
            bounds[row, order[i]] = NOTHING
        real += load_short(counts + order[i] * places[COUNTS, 3])
    keys, values = address(places[OLD_KEYS], b, h), address(places[OLD_VALUES], b, h)
    values += sizes[SINKS] * places[OLD_VALUES, 3]
    rows_of_masks = np.empty(rows, np.int64)
    for row in range(rows):
        rows_of_masks[row] = mask_room[row].ctypes.data
    found, unit, end = 0, 0, 0
    while unit < sizes[UNITS]:
        begin, end = end, min(first + unit * size, old)
        if marks[unit] == 1:
            marks[unit] = 2
            for t in range(begin, end):
                tokens[found] = t
                found += 1
                if found == BLOCK:
                    attend_block(
                        queries, rows, places, sizes, h, masks, rows_of_masks, keys, values, found, rooms, state
                    )
                    found = 0
        unit += 1
    if found:
        attend_block(queries, rows, places, sizes, h, masks, rows_of_masks, keys, values, found, rooms, state)
    return real


@part
def attend_block(queries, rows, places, sizes, h, masks, rows_of_masks, keys, values, count, rooms, state):
    """Copy the tokens of a block and attend to them."""
    key_room, value_room, mask_room, tokens, logits, scaled = rooms
    width, value_width = sizes[KEPT_COUNT], sizes[VALUE_WIDTH]
    key_step, value_step = places[OLD_KEYS, 3], places[OLD_VALUES, 3]
    read_tokens(keys, key_step, values, value_step, tokens, count, width, value_width, key_room, value_room)
    if sizes[KIND] == BOOL:
        for row in range(rows):
            for i in range(count):
                mask_room[row, i] = load_byte(masks[row] + (sizes[SINKS] + tokens[i]) * places[MASK, 4])
    attend_segment(
        queries,
        h,
        (key_room.ctypes.data, key_room.shape[1] * BYTES, BY_TOKEN, width, NO_FORM),
        (value_room.ctypes.data, value_room.shape[1] * BYTES, False, value_width, NO_FORM, 0),
        0,
        count,
        rows,
        (sizes[KIND], rows_of_masks, 1, rows_of_masks, 0),
        False,
        np.float32(1),
        logits,
        scaled,
        state,
        None,
    )


@part
def joined(largest, sums):
    """Logarithm of a running sum, in powers of two."""
    return np.float64(largest) + math.log2(np.float64(sums)) if sums > 0 else -np.inf


@part
def bound_of(row, units, read, read_terms, rest_terms, width, count, shares):
    """What `certificate.unread_bound` says, from numbers in powers of two; units that were read have no bound."""
    rest, _ = log_sum(row, units, shares)
    if rest == -np.inf:
        return 0.0
    slack = (width + BESIDES) * PRECISION * (read_terms + rest_terms) / BITS + count * PRECISION * 4 + 2 * MARGIN
    exponent = (read - rest) / BITS - slack
    if not (read > -1e30 * BITS and exponent == exponent):
        return 1.0
    return min((1 + 1e-12) / (1.0 + math.exp(min(exponent, 700.0))), 1.0)


@part
def attend_few(taken, places, sizes, factors, least, output, bounds_out, read_out):
    """Process the items not taken yet; threads that call this on the same arrays share them.

    Parameters
    ----------
    taken : (1,) int64
        Number of items taken so far.
    places : (12, 5) int64
    sizes : (13,) int64
    factors : (3,) float64
        Scaling; epsilon and share expected, negative for none.
    least : (B,) int64
    output : (B, H_q, d_v) float32
    bounds_out : (B, H_q) float64
    read_out : (B, H) int64
    """
    heads, rows, width, kept = sizes[HEADS], sizes[GROUP], sizes[WIDTH], sizes[KEPT_COUNT]
    value_width, units = sizes[VALUE_WIDTH], sizes[UNITS]
    room, columns = (rows + ROWS - 1) // ROWS * ROWS, (units + 2 * LANES - 1) // LANES * LANES
    full = np.zeros((room, (width + LANES - 1) // LANES * LANES), np.float32)
    narrow = np.zeros((room, (kept + LANES - 1) // LANES * LANES), np.float32)
    half = np.zeros_like(narrow)
    expected, bounds = np.zeros((room, columns), np.float32), np.zeros((room, columns), np.float32)
    score, order, marks = np.empty(columns, np.float32), np.empty(units, np.int64), np.empty(units, np.uint8)
    buckets, sums = np.empty(BUCKETS + 1, np.int64), np.empty(rows, np.float64)
    tops, unit_shares = np.empty(rows, np.float32), np.empty((rows, columns), np.float32)
    masks, last_columns = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    logits = np.zeros((ROWS, BLOCK + LANES), np.float32)
    scaled = np.zeros((ROWS, max(narrow.shape[1], logits.shape[1])), np.float32)
    products = np.zeros((room, (value_width + 2 * LANES - 1) // (2 * LANES) * 2 * LANES), np.float32)
    rooms = (
        np.zeros((BLOCK, narrow.shape[1]), np.float32),
        np.zeros((BLOCK, products.shape[1]), np.float32),
        np.zeros((rows, BLOCK), np.uint8),
        np.zeros(BLOCK, np.int64),
        logits,
        scaled,
    )
    largest, shares = np.empty(rows, np.float32), np.empty(rows, np.float32)
    reach_around, reach = np.zeros(full.shape[1], np.float32), np.zeros(narrow.shape[1], np.float32)
    dense, terms, around = np.empty(rows, np.float64), np.empty(rows, np.float64), np.empty(rows, np.float64)
    certain = np.empty(rows, np.float64)
    every = sizes[SINKS] + sizes[OLD] + sizes[TAIL]
    while True:
        item = add_one(taken)
        if item >= least.shape[0] * heads:
            return
        b, h = item // heads, item % heads
        at = address(places[QUERY], b, h * rows)
        read_queries(
            at,
            places[QUERY, 2],
            places[QUERY, 3],
            places[QUERY, 4],
            rows,
            1,
            width,
            np.float32(factors[SCALE]) * LOG2E,
            full,
        )
        gather(full, rows, width, address(places[KEPT], b, h), places[KEPT, 4], kept, narrow)
        for row in range(rows):
            masks[row] = address(places[MASK], b, h * rows + row)
            largest[row], shares[row] = NOTHING, ZERO
            for c in range(products.shape[1]):
                products[row, c] = ZERO
        state = largest, shares, products
        reach_around[:] = ZERO
        for segment in (SINK_KEYS, TAIL_KEYS):
            newest = segment == TAIL_KEYS
            count, column = (sizes[TAIL], sizes[SINKS] + sizes[OLD]) if newest else (sizes[SINKS], 0)
            stored = TAIL_VALUES if newest else OLD_VALUES
            keys, step = address(places[segment], b, h), places[segment, 3]
            attend_segment(
                full,
                h,
                (keys, step, BY_TOKEN, width, NO_FORM),
                (address(places[stored], b, h), places[stored, 3], False, value_width, NO_FORM, 0),
                0,
                count,
                rows,
                (sizes[KIND], masks, places[MASK, 4], last_columns, column),
                False,
                np.float32(1),
                logits,
                scaled,
                state,
                None,
            )
            raise_reach(keys, step, count, width, reach_around)
        for c in range(kept):
            reach[c] = load_one(address(places[REACH], b, h) + c * BYTES)
        for row in range(rows):
            dense[row] = joined(largest[row], shares[row])
            terms[row], around[row] = terms_of(narrow[row], reach, kept), terms_of(full[row], reach_around, width)
        if sizes[LEAD]:
            estimate_tokens(narrow, rows, places, sizes, b, h, expected, bounds, terms)
        else:
            estimate_pages(narrow, rows, places, sizes, b, h, expected, bounds, half)
        if sizes[KIND] == BOOL:
            hide_units(rows, places, sizes, masks, expected, bounds)
        for row in range(rows):
            sums[row], tops[row] = log_sum(expected[row], units, unit_shares[row])
        sort_units(rows, units, expected, sums, score, buckets, order)
        for u in range(units):
            marks[u] = 0
        stop, done, real = min(least[b], units), 0, 0
        if factors[TOP_P] > 0:
            stop = min(expected_enough(rows, units, sums, tops, unit_shares, dense, order, factors[TOP_P], stop), units)
        more = (units + ROUNDS - 1) // ROUNDS
        while True:
            real += read_units(narrow, rows, places, sizes, b, h, masks, order, done, stop, marks, bounds, rooms, state)
            done, worst = stop, 0.0
            for row in range(rows):
                read, most = joined(largest[row], shares[row]), max(terms[row], around[row])
                certain[row] = bound_of(bounds[row], units, read, most, terms[row], width, every, unit_shares[row])
                worst = max(worst, certain[row])
            if factors[EPSILON] <= 0 or worst <= factors[EPSILON] or done >= units:
                break
            stop = min(done + more, units)
        read_out[b, h] = real
        for row in range(rows):
            bounds_out[b, h * rows + row] = certain[row]
            for c in range(value_width):
                output[b, h * rows + row, c] = products[row, c] / shares[row]


@c_function("void(voidptr)")
def attend_few_at(data):
    """`attend_few`, as threads call it: with the addresses of the arrays, and their sizes."""
    given = carray(data, (12,), np.int64)
    batch, query_heads, width, heads = given[8], given[9], given[10], given[11]
    attend_few(
        integers(given[0], (1,)),
        integers(given[1], (12, 5)),
        integers(given[2], (13,)),
        carray(pointer(given[3]), (3,), np.float64),
        integers(given[4], (batch,)),
        numbers(given[5], (batch, query_heads, width)),
        carray(pointer(given[6]), (batch, query_heads), np.float64),
        integers(given[7], (batch, heads)),
    )
