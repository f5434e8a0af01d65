"""Attention of one new query over few of the stored tokens on the CPU: scores, choice, attention, bound in one loop.

`grace_opt.kernels.reading.host` calls it; `reference` defines the result. An item is one KV head of one sequence; its
tokens are scored, and read, in runs, so that few items keep many threads busy. Units are counted by score, for the
whole group of query heads, which says up to which score they are read. Tokens are copied, a block at a time and in the
order in which they lie, to where the decoding kernel's loops (`grace_opt.kernels.decode.cpu`) read them. Logits are in
powers of two; scores lack what all logits have in common. Bounds are joined in float64 with what `certificate` allows
for rounding.
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
    load_byte_levels,
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
from ..decode.cpu import (
    BLOCK,
    LEAST,
    LOG2E,
    NOTHING,
    address,
    attend_segment,
    gather,
    integers,
    numbers,
    read_queries,
    turn_into_shares,
)
from ..decode.cpu.logits import logits_by_token
from ..decode.cpu.rows import BYTES, WHOLE, add_multiples, store_four
from ..decode.cpu.values import add_values
from ..decode.forms import BOOL, BY_TOKEN, LANES, ROWS
from .forms import (
    ABOUT,
    AROUND,
    BESIDES,
    BUCKETS,
    CODES,
    COUNTS,
    DONE,
    FIRST_CHOSEN,
    FOUND,
    HIDDEN,
    KEPT,
    LENGTH,
    LEVELS,
    LOWER,
    MARGIN,
    MASK,
    MEAN,
    MORE_CHOSEN,
    NORMS,
    OFF,
    OLD_KEYS,
    OLD_VALUES,
    PLACES,
    QUERY,
    REACH,
    READ,
    REAL,
    SCORED,
    SINK_KEYS,
    STEPS,
    STOP,
    TAIL_KEYS,
    TAIL_VALUES,
    TERMS,
    UPPER,
)

#: Entries of `sizes`.
HEADS, GROUP, WIDTH, KEPT_COUNT, VALUE_WIDTH, SINKS, OLD, TAIL, UNITS, SIZE, FIRST, LEAD, KIND, RUNS = range(14)
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
def score_pages(queries, rows, places, sizes, b, h, start, stop, expected, other, half):
    """Fill the bounds of pages `start` to `stop`, which are the scores too; `other` and `half` are room."""
    width, count = sizes[KEPT_COUNT], stop - start
    step, out_step = queries.shape[1] * BYTES, expected.shape[1] * BYTES
    for side in range(2):
        for row in range(rows):
            for c in range(width):
                x = queries[row, c]
                half[row, c] = (x if x > 0 or x != x else ZERO) if side == 0 else (x if x < 0 else ZERO)
        place = places[UPPER if side == 0 else LOWER]
        ranges, out = address(place, b, h) + start * place[3], expected if side == 0 else other
        for first in range(0, rows, ROWS):
            four, to = half.ctypes.data + first * step, out.ctypes.data + first * out_step + start * BYTES
            logits_by_token(four, step, ranges, place[3], width, count, to, out_step)
    counts = places[COUNTS, 0] + b * places[COUNTS, 1]
    for u in range(start, stop):
        number = load_short(counts + u * places[COUNTS, 3])
        more = np.float32(math.log2(number)) if number > 0 else NOTHING
        for row in range(rows):
            expected[row, u] = (expected[row, u] + other[row, u]) + more


@part
def score_tokens(queries, rows, places, sizes, b, h, start, stop, expected, scaled):
    """Fill what steps times codes add to the logits of tokens `start` to `stop`, multiples of `ROOM` but for the last;
    minus infinity for padding. `scaled` is room."""
    lead, levels, place = sizes[LEAD], address(places[LEVELS], b, h), places[CODES]
    for row in range(rows):
        for c in range(lead):
            scaled[row, c] = queries[row, c] * load_one(levels + c * BYTES)
    step, out_step = scaled.shape[1] * BYTES, expected.shape[1] * BYTES
    for first in range(0, rows, ROWS):
        four, to = scaled.ctypes.data + first * step, expected.ctypes.data + first * out_step
        for t in range(start, stop, 2 * LANES):
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(ZERO)
            at = address(place, b, h) + t
            for c in range(lead):
                x, y = load_byte_levels(at, 0, 8), load_byte_levels(at + LANES, 0, 8)
                a0, a1, a2, a3 = add_multiples(four + c * BYTES, step, x, a0, a1, a2, a3)
                b0, b1, b2, b3 = add_multiples(four + c * BYTES, step, y, b0, b1, b2, b3)
                at += place[3]
            store_four(to + t * BYTES, out_step, a0, a1, a2, a3)
            store_four(to + t * BYTES + WHOLE, out_step, b0, b1, b2, b3)
    counts, u = places[COUNTS, 0] + b * places[COUNTS, 1], start
    while u < stop and load_short(counts + u * places[COUNTS, 3]) == 0:  # padding comes first
        for row in range(rows):
            expected[row, u] = NOTHING
        u += 1


@part
def describe_others(queries, rows, places, sizes, b, h, about):
    """Write what all logits of a row have besides the scores, what codes are off, and the query's norm in the channels
    without scores; add to the terms what those of the bounds have besides."""
    width, lead, units = sizes[KEPT_COUNT], sizes[LEAD], sizes[UNITS]
    norms, mean, levels = address(places[LOWER], b, h), address(places[UPPER], b, h), address(places[LEVELS], b, h)
    low = levels + places[LEVELS, 3]
    off = low + places[LEVELS, 3]
    largest = spread(ZERO)
    for u in range(0, units, LANES):
        largest = greater(largest, load_some(norms + u * BYTES, min(LANES, units - u)))
    longest = np.float64(greatest(largest))
    for row in range(rows):
        constant, square, error = 0.0, 0.0, 0.0
        for c in range(lead):
            q = np.float64(queries[row, c])
            constant += q * np.float64(load_one(low + c * BYTES))
            error += abs(q) * np.float64(load_one(off + c * BYTES))
        for c in range(lead, width):
            q = np.float64(queries[row, c])
            constant += q * np.float64(load_one(mean + (c - lead) * BYTES))
            square += q * q
        about[MEAN, row], about[OFF, row], about[LENGTH, row] = constant, error, math.sqrt(square)
        about[TERMS, row] = 4 * about[TERMS, row] + about[LENGTH, row] * longest


@part
def hide_units(rows, places, sizes, masks, expected):
    """Write minus infinity for units of which the mask shows no token."""
    stop = 0
    for u in range(sizes[UNITS]):
        start, stop = stop, min(sizes[FIRST] + u * sizes[SIZE], sizes[OLD])
        for row in range(rows):
            seen = 0
            for t in range(start, stop):
                seen += load_byte(masks[row] + (sizes[SINKS] + t) * places[MASK, 4]) != 0
            if seen == 0:
                expected[row, u] = NOTHING


@part
def rank_units(rows, units, expected, sums, score, ranks, numbers):
    """Write how many steps each unit is below the first, and how many units there are at each step.

    Units are read in this order, and at one step as they lie: it is `reference.reading_order`.
    """
    to, highest = score.ctypes.data, spread(NOTHING)
    for u in range(0, units, LANES):
        best = spread(NOTHING)
        for row in range(rows):
            x = load(expected[row].ctypes.data + u * BYTES)
            best = greater(best, x - spread(np.float32(sums[row])) if rows > 1 else x)
        store(to + u * BYTES, best)
        highest = greater(highest, best)
    top = greatest(highest)
    for n in range(BUCKETS):
        numbers[n] = 0
    for u in range(units):
        below = (top - score[u]) * STEP
        rank = 0 if below != below else (np.int64(below) if below < HIDDEN - 1 else HIDDEN - 1)
        if score[u] == NOTHING:
            rank = HIDDEN
        ranks[u] = rank
        numbers[rank] += 1


@part
def expected_enough(rows, units, sums, tops, shares, dense, ranks, numbers, mass, top_p, least):
    """How many units have the wanted share of the attention that is expected, with the dense tokens, for every row.

    `mass` is room for the shares at each step; `sums` and `dense` are relative to what `tops` are.
    """
    wanted = np.empty(rows, np.float64)
    for row in range(rows):
        wanted[row] = -np.inf
        if -np.inf < sums[row] < np.inf:
            units_sum, top = 2.0 ** (sums[row] - np.float64(tops[row])), np.float64(tops[row])
            wanted[row] = units_sum - (1.0 - top_p) * (units_sum + 2.0 ** (dense[row] - top))
    for n in range(BUCKETS):
        for row in range(rows):
            mass[n, row] = 0.0
    for u in range(units):
        for row in range(rows):
            mass[ranks[u], row] += np.float64(shares[row, u])
    count = 0
    for n in range(BUCKETS):
        lacking, beyond = False, False
        for row in range(rows):
            lacking |= wanted[row] > 0
            beyond |= wanted[row] > max(mass[n, row], 0.0)
        if not lacking:
            break
        if beyond:  # all at this step are needed, and more
            for row in range(rows):
                wanted[row] -= mass[n, row]
            count += numbers[n]
            continue
        for u in range(units):
            if ranks[u] == n:
                lacking = False
                for row in range(rows):
                    lacking |= wanted[row] > 0
                if not lacking:
                    break
                for row in range(rows):
                    wanted[row] -= np.float64(shares[row, u])
                count += 1
        break
    return max(count, least)


@part
def take_units(count, units, ranks, numbers, taken):
    """Write the next `count` units in the order of reading, in that of the tokens; they are not taken again."""
    border, left = 0, count
    while border < BUCKETS and left >= numbers[border]:
        left -= numbers[border]
        numbers[border] = 0
        border += 1
    if border < BUCKETS:
        numbers[border] -= left
    found = 0
    for u in range(units):
        rank = ranks[u]
        if rank < border or (rank == border and left > 0):
            left -= rank == border
            taken[found] = u
            ranks[u] = BUCKETS
            found += 1
    return found


@part
def copy_tokens(at, step, tokens, count, width, room):
    """Copy tokens to the room, one after the other."""
    to, row = room.ctypes.data, room.shape[1] * BYTES
    full, rest = width - width % LANES, width % LANES
    for i in range(count):
        ahead = at + tokens[min(i + AHEAD, count - 1)] * step
        for c in range(0, width * BYTES, 64):
            ask_for(ahead + c)
        one, place = at + tokens[i] * step, to + i * row
        for c in range(0, full * BYTES, WHOLE):
            store(place + c, load(one + c))
        if rest:
            store_some(place + full * BYTES, load_some(one + full * BYTES, rest), rest)


@part
def read_units(queries, rows, places, sizes, b, h, masks, taken, found, expected, rooms, state):
    """Attend to the tokens of units, and take these out of what is expected; return how many real ones they have."""
    tokens, size, first = rooms[2], sizes[SIZE], sizes[FIRST]
    counts, real, count = places[COUNTS, 0] + b * places[COUNTS, 1], 0, 0
    for i in range(found):
        unit = taken[i]
        real += load_short(counts + unit * places[COUNTS, 3])
        for t in range(max(first + (unit - 1) * size, 0), min(first + unit * size, sizes[OLD])):
            tokens[count] = t
            count += 1
            if count == BLOCK:
                attend_block(queries, rows, places, sizes, b, h, masks, count, rooms, state)
                count = 0
    if count:
        attend_block(queries, rows, places, sizes, b, h, masks, count, rooms, state)
    for row in range(rows):
        for i in range(found):
            expected[row, taken[i]] = NOTHING
    return real


@part
def attend_block(queries, rows, places, sizes, b, h, masks, count, rooms, state):
    """Copy the tokens of a block and attend to them."""
    key_room, value_room, tokens, logits = rooms
    largest, sums, products = state
    width, value_width = sizes[KEPT_COUNT], sizes[VALUE_WIDTH]
    keys, values = address(places[OLD_KEYS], b, h), address(places[OLD_VALUES], b, h)
    copy_tokens(keys, places[OLD_KEYS, 3], tokens, count, width, key_room)
    value_step = places[OLD_VALUES, 3]
    copy_tokens(values + sizes[SINKS] * value_step, value_step, tokens, count, value_width, value_room)
    query_step, out_step, logit_step = queries.shape[1] * BYTES, products.shape[1] * BYTES, logits.shape[1] * BYTES
    key_step, to = key_room.shape[1] * BYTES, logits.ctypes.data
    for first in range(0, rows, ROWS):
        four = queries.ctypes.data + first * query_step
        logits_by_token(four, query_step, key_room.ctypes.data, key_step, width, count, to, logit_step)
        for row in range(first, min(first + ROWS, rows)):
            line = logits[row - first]
            if sizes[KIND] == BOOL:
                for i in range(count):
                    if load_byte(masks[row] + (sizes[SINKS] + tokens[i]) * places[MASK, 4]) == 0:
                        line[i] = LEAST
            largest[row], shrink, more = turn_into_shares(line, count, largest[row])
            sums[row] = sums[row] * shrink + more
            if shrink != 1:
                for c in range(products.shape[1]):
                    products[row, c] *= shrink
        place, step = products.ctypes.data + first * out_step, value_room.shape[1] * BYTES
        add_values(to, logit_step, value_room.ctypes.data, step, value_width, count, place, out_step)


@part
def joined(largest, sums):
    """Logarithm of a running sum, in powers of two."""
    return np.float64(largest) + math.log2(np.float64(sums)) if sums > 0 else -np.inf


@part
def log_bounds(row, units, norms, length, shares):
    """Logarithm of the sum of what is expected of units, or more: for tokens, with their norms times a length."""
    if length >= 0:
        at, to, factor = row.ctypes.data, shares.ctypes.data, spread(length)
        for u in range(0, units, LANES):
            norm = load_some(norms + u * BYTES, min(LANES, units - u))
            store(to + u * BYTES, multiply_add(factor, norm, load(at + u * BYTES)))
        rest, _ = log_sum(shares, units, shares)
    else:
        rest, _ = log_sum(row, units, shares)
    return rest


@part
def bound_of(rest, read, read_terms, rest_terms, width, count):
    """What `certificate.unread_bound` says, from numbers in powers of two."""
    if rest == -np.inf:
        return 0.0
    slack = (width + BESIDES) * PRECISION * (read_terms + rest_terms) / BITS + count * PRECISION * 4 + 2 * MARGIN
    exponent = (read - rest) / BITS - slack
    if not (read > -1e30 * BITS and exponent == exponent):
        return 1.0
    return min((1 + 1e-12) / (1.0 + math.exp(min(exponent, 700.0))), 1.0)


@part
def queries_of(item, places, sizes, factors, full, narrow):
    """Write the scaled queries of an item, and their channels as keys have them; return its sequence and KV head."""
    b, h, rows = item // sizes[HEADS], item % sizes[HEADS], sizes[GROUP]
    at, place = address(places[QUERY], b, h * rows), places[QUERY]
    scale = np.float32(factors[SCALE]) * LOG2E
    read_queries(at, place[2], place[3], place[4], rows, 1, sizes[WIDTH], scale, full)
    gather(full, rows, sizes[WIDTH], address(places[KEPT], b, h), places[KEPT, 4], sizes[KEPT_COUNT], narrow)
    return b, h


@part
def score(item, run, places, sizes, factors, full, narrow, half, expected):
    """Score the units of a run."""
    rows, units = sizes[GROUP], sizes[UNITS]
    some = (units // sizes[RUNS] // (2 * LANES) + 1) * 2 * LANES  # an odd number writes one more
    start, stop = min(run * some, units), min((run + 1) * some, units)
    if start < stop:
        b, h = queries_of(item, places, sizes, factors, full, narrow)
        if sizes[LEAD]:
            score_tokens(narrow, rows, places, sizes, b, h, start, stop, expected, half)
        else:
            other = np.empty_like(expected)
            score_pages(narrow, rows, places, sizes, b, h, start, stop, expected, other, half)


@part
def clear(largest, sums, products):
    """Make the states of an item's runs those of nothing read."""
    for run in range(largest.shape[0]):
        for row in range(largest.shape[1]):
            largest[run, row], sums[run, row] = NOTHING, ZERO
        for row in range(products.shape[1]):
            for c in range(products.shape[2]):
                products[run, row, c] = ZERO


@part
def prepare(item, places, sizes, factors, least, full, narrow, masks, rooms, state, about, expected, ranks, numbers_at):
    """Attend to the dense tokens, and say in which order units are read, and how many."""
    rows, width, kept, units = sizes[GROUP], sizes[WIDTH], sizes[KEPT_COUNT], sizes[UNITS]
    logits, scaled = rooms
    largest, sums, _ = state
    b, h = queries_of(item, places, sizes, factors, full, narrow)
    last_columns = np.zeros(rows, np.int64)
    reach_around, reach = np.zeros(full.shape[1], np.float32), np.zeros(narrow.shape[1], np.float32)
    for segment in (SINK_KEYS, TAIL_KEYS):
        newest = segment == TAIL_KEYS
        count, column = (sizes[TAIL], sizes[SINKS] + sizes[OLD]) if newest else (sizes[SINKS], 0)
        stored = TAIL_VALUES if newest else OLD_VALUES
        keys, step = address(places[segment], b, h), places[segment, 3]
        attend_segment(
            full,
            h,
            (keys, step, BY_TOKEN, width, NO_FORM),
            (address(places[stored], b, h), places[stored, 3], False, sizes[VALUE_WIDTH], NO_FORM, 0),
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
        about[TERMS, row], about[AROUND, row] = (
            terms_of(narrow[row], reach, kept),
            terms_of(full[row], reach_around, width),
        )
        about[MEAN, row], about[OFF, row], about[LENGTH, row] = 0.0, 0.0, -1.0
    if sizes[LEAD]:
        describe_others(narrow, rows, places, sizes, b, h, about)
    if sizes[KIND] == BOOL:
        hide_units(rows, places, sizes, masks, expected)
    shares, room = np.empty((rows, expected.shape[1]), np.float32), np.empty(expected.shape[1], np.float32)
    totals, tops, dense = np.empty(rows, np.float64), np.empty(rows, np.float32), np.empty(rows, np.float64)
    for row in range(rows):
        totals[row], tops[row] = log_sum(expected[row], units, shares[row])
        dense[row] = joined(largest[row], sums[row]) - about[MEAN, row]
    rank_units(rows, units, expected, totals, room, ranks, numbers_at)
    stop = min(least[0, b], units)
    if factors[TOP_P] > 0:
        mass = np.empty((BUCKETS, rows), np.float64)
        enough = expected_enough(
            rows, units, totals, tops, shares, dense, ranks, numbers_at, mass, factors[TOP_P], stop
        )
        stop = min(enough, units)
    return stop


@part
def finish(item, sizes, factors, least, states, about, expected, counts, output, bounds_out):
    """Join the runs, and bound what was not read; return how many units are to be read then, more if there are too few.

    `counts` are the numbers of units read, and of real tokens by run.
    """
    rows, units, value_width = sizes[GROUP], sizes[UNITS], sizes[VALUE_WIDTH]
    largest, sums, products = states
    every, worst, done = sizes[SINKS] + sizes[OLD] + sizes[TAIL], 0.0, counts[DONE]
    b, h, room = item // sizes[HEADS], item % sizes[HEADS], np.empty(expected.shape[1], np.float32)
    for row in range(rows):
        top, divisor = NOTHING, ZERO
        for run in range(largest.shape[0]):
            top = max(top, largest[run, row])
        for c in range(value_width):
            output[b, h * rows + row, c] = ZERO
        for run in range(largest.shape[0]):
            if sums[run, row] == 0:
                continue
            weight = np.float32(2.0) ** (largest[run, row] - top)
            divisor += weight * sums[run, row]
            for c in range(value_width):
                output[b, h * rows + row, c] += weight * products[run, row, c]
        for c in range(value_width):
            output[b, h * rows + row, c] /= divisor
        rest, read = -np.inf, joined(top, divisor)
        if done < units:
            rest = log_bounds(expected[row], units, counts[NORMS], np.float32(about[LENGTH, row]), room)
            rest += about[MEAN, row] + about[OFF, row]
        terms = about[TERMS, row]
        bound = bound_of(rest, read, max(terms, about[AROUND, row]), terms, sizes[WIDTH], every)
        bounds_out[b, h * rows + row] = bound
        worst = max(worst, bound)
    if factors[EPSILON] <= 0 or worst <= factors[EPSILON]:
        return done
    return min(done + least[1, b], units)


@part
def attend_few(phase, taken, places, sizes, factors, least, output, bounds_out, work):
    """Process the items of a phase that are not taken yet; threads that call this on the same arrays share them.

    First the units are `SCORED`, in runs; then some are chosen and `READ`, in runs, and what was read is `JOINED`; the
    last three as often as needed.

    Parameters
    ----------
    phase : int
    taken : (1,) int64
        Number of items of this phase taken so far.
    places : (14, 5) int64
    sizes : (14,) int64
    factors : (3,) float64
        Scaling; epsilon and share expected, negative for none.
    least : (2, B) int64
        Number of units to read at least, and how many more at a time.
    output : (B, H_q, d_v) float32
    bounds_out : (B, H_q) float64
    work : tuple
        What the phases leave to each other: scores (items, rows, units), how many steps each unit is below the first
        (items, units) and numbers of units at each (items, BUCKETS), the units to read (items, units), numbers of rows
        (items, 5, rows), counts (items, 4 + runs), and of every run and the dense tokens: largest, sums (items, runs,
        rows) and products (items, runs, rows, d_v).
    """
    expected, ranks, numbers_at, chosen, about, counts, largest, sums, products = work
    rows, width, kept, runs = sizes[GROUP], sizes[WIDTH], sizes[KEPT_COUNT], sizes[RUNS]
    items, room = expected.shape[0], expected.shape[1]
    full = np.zeros((room, (width + LANES - 1) // LANES * LANES), np.float32)
    narrow = np.zeros((room, (kept + LANES - 1) // LANES * LANES), np.float32)
    half, masks = np.zeros_like(narrow), np.zeros(rows, np.int64)
    logits = np.zeros((ROWS, BLOCK + LANES), np.float32)
    scaled = np.zeros((ROWS, max(narrow.shape[1], logits.shape[1])), np.float32)
    key_room = np.zeros((BLOCK, narrow.shape[1]), np.float32)
    value_room, tokens = np.zeros((BLOCK, products.shape[3]), np.float32), np.zeros(BLOCK, np.int64)
    pieces = items * runs if phase in (SCORED, READ) else items
    while True:
        piece = add_one(taken)
        if piece >= pieces:
            return
        item, run = (piece // runs, piece % runs) if pieces > items else (piece, 0)
        b, h, count = item // sizes[HEADS], item % sizes[HEADS], counts[item]
        for row in range(rows):
            masks[row] = address(places[MASK], b, h * rows + row)
        if phase == SCORED:
            score(item, run, places, sizes, factors, full, narrow, half, expected[item])
        elif phase in (FIRST_CHOSEN, MORE_CHOSEN):
            if phase == FIRST_CHOSEN:
                clear(largest[item], sums[item], products[item])
                for place in range(runs):
                    count[REAL + place] = 0
                state = largest[item, runs], sums[item, runs], products[item, runs]
                parts = (logits, scaled), state, about[item], expected[item], ranks[item], numbers_at[item]
                count[STOP] = prepare(item, places, sizes, factors, least, full, narrow, masks, *parts)
                count[DONE], count[NORMS] = 0, address(places[LOWER], b, h)
            count[FOUND] = take_units(
                count[STOP] - count[DONE], sizes[UNITS], ranks[item], numbers_at[item], chosen[item]
            )
            count[DONE] = count[STOP]
        elif phase == READ:
            start, stop = count[FOUND] * run // runs, count[FOUND] * (run + 1) // runs
            if start < stop:
                queries_of(item, places, sizes, factors, full, narrow)
                state, mine = (largest[item, run], sums[item, run], products[item, run]), chosen[item, start:stop]
                rooms = key_room, value_room, tokens, logits
                count[REAL + run] += read_units(
                    narrow, rows, places, sizes, b, h, masks, mine, stop - start, expected[item], rooms, state
                )
        else:
            states = largest[item], sums[item], products[item]
            mine = about[item], expected[item]
            count[STOP] = finish(item, sizes, factors, least, states, *mine, count, output, bounds_out)


@c_function("void(voidptr)")
def attend_few_at(data):
    """`attend_few`, as threads call it: with the addresses of the arrays, and their sizes."""
    given = carray(data, (24,), np.int64)
    batch, query_heads, width, heads = given[8], given[9], given[10], given[11]
    room, columns, units, runs, wide = given[12], given[13], given[14], given[15], given[23]
    items, rows = batch * heads, query_heads // heads
    work = (
        numbers(given[16], (items, room, columns)),
        carray(pointer(given[17]), (items, units), np.int16),
        integers(given[18], (items, BUCKETS)),
        integers(given[19], (items, units)),
        carray(pointer(given[20]), (items, ABOUT, rows), np.float64),
        integers(given[21], (items, REAL + runs)),
        numbers(given[22], (items, runs + 1, rows)),
        numbers(given[22] + items * (runs + 1) * rows * BYTES, (items, runs + 1, rows)),
        numbers(given[22] + 2 * items * (runs + 1) * rows * BYTES, (items, runs + 1, room, wide)),
    )
    attend_few(
        given[7],
        integers(given[0], (1,)),
        integers(given[1], (PLACES, 5)),
        integers(given[2], (14,)),
        carray(pointer(given[3]), (3,), np.float64),
        integers(given[4], (2, batch)),
        numbers(given[5], (batch, query_heads, width)),
        carray(pointer(given[6]), (batch, query_heads), np.float64),
        work,
    )
