r"""Attention of a few query rows over a pruned key cache on the CPU: one pass over keys and values, in float32.

`grace_opt.kernels.cache.decode.host` calls it. The columns of all heads are cut into splits; a task is one split of one
KV head. It holds the queries of the whole group, gathers their kept channels once, and processes its columns in blocks
with a running maximum :math:`m`, sum :math:`l = \sum_j 2^{x_j - m}` and product :math:`a = \sum_j 2^{x_j - m} v_j`, in
which logits are in powers of two (times :math:`\log_2 e`). `join` combines the splits. Every thread computes a task in
the same way, so the result does not depend on the number of threads.

Both products take four rows at a time (`rows`), and logits are made from dense keys in
two orders or from keys in a few bits (`logits`). Addresses are plain integers: strided
views need no array type of their own, so the kernel is compiled once and not once for every combination of layouts.

NaN is not lost: nothing is compiled with options that assume there is none.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), for splitting along the tokens; Milakov and
Gimelshein (arXiv 1805.02867) for the running softmax.
"""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ...._shared.jit import c_function, inlined
from ...._shared.lanes import (
    add_one,
    exp2,
    greater,
    greatest,
    load,
    load_byte,
    load_one,
    load_place,
    spread,
    store,
    total,
)
from ...._shared.memory import array_at, start_of, zeros
from ..forms import ADDITIVE, BOOL, BY_CHANNEL, BY_TOKEN, CAUSAL, LANES, PACKED, ROWS
from .logits import logits_by_channel, logits_by_token, logits_packed
from .rows import BYTES, WHOLE
from .values import add_packed_values, add_values

#: Number of columns whose logits are computed before they become shares.
BLOCK = 64

LOG2E = np.float32(np.log2(np.e))
#: Logit of a hidden column, instead of minus infinity: a row that sees nothing gets the mean of all values.
LEAST = np.float32(np.finfo(np.float32).min)
NOTHING, NAN, ZERO = np.float32(-np.inf), np.float32(np.nan), np.float32(0.0)

#: Rows of `places`; the columns are address and strides (batch, head, token or row, channel or column), in bytes.
QUERY, KEPT, SINK_KEYS, PRUNED_KEYS, TAIL_KEYS, OLD_VALUES, TAIL_VALUES, MASK = range(8)


@inlined
def cap(logits, outer):
    """Soft-cap logits given in powers of e^2: tanh(x) = 1 - 2 / (e^2x + 1), times `outer`."""
    start, one, two, scale = start_of(logits), spread(np.float32(1)), spread(np.float32(2)), spread(outer)
    for place in range(start, start + logits.shape[0] * BYTES, WHOLE):
        store(place, scale * (one - two / (exp2(load(place)) + one)))


@inlined
def hide_bool(logits, count, mask, step):
    """Write the smallest number where the mask is False."""
    for t in range(count):
        if load_byte(mask + t * step) == 0:
            logits[t] = LEAST


@inlined
def add_mask(logits, count, mask, step):
    """Add the mask; minus infinity becomes the smallest number, NaN is kept."""
    for t in range(count):
        x = logits[t] + load_one(mask + t * step) * LOG2E
        logits[t] = LEAST if x < LEAST else x


@inlined
def turn_into_shares(logits, count, largest):
    """Replace the logits of one row by its shares.

    Returns the new maximum, the factor by which earlier sums must be multiplied, and the sum of the shares.
    """
    stop = (count + LANES - 1) // LANES * LANES
    for t in range(count, stop):
        logits[t] = NOTHING  # columns that do not exist get no share even in a row that sees nothing
    start = start_of(logits)
    best = spread(largest)
    for place in range(start, start + stop * BYTES, WHOLE):
        best = greater(best, load(place))
    now = greatest(best)
    shift, sums = spread(now), spread(ZERO)
    for place in range(start, start + stop * BYTES, WHOLE):
        share = exp2(load(place) - shift)
        store(place, share)
        sums = sums + share
    return now, total(exp2(spread(largest) - shift)) / np.float32(LANES), total(sums)


@inlined
def attend_region(queries, head, keys, values, start, stop, rows, hidden, softcap, outer, logits, scaled, state, packs):
    """Attend to columns `start` to `stop` of a region: sinks, pruned tokens or tail.

    `keys` are (address, step or owners, layout, width, form), `values` (address, step or owners, whether packed,
    width, form, tokens before this region's), `hidden` (kind of mask, rows' addresses, step, rows' last columns, the
    region's first column), `state` (maxima, sums and products of the rows so far); `packs` is None where nothing is
    packed.
    """
    keys_at, key_step, layout, width, key_form = keys
    values_at, value_step, packed, value_width, value_form, before = values
    kind, masks, mask_step, last_columns, column = hidden
    largest, sums, products = state
    query_step, out_step, logit_step = queries.shape[1] * BYTES, products.shape[1] * BYTES, logits.shape[1] * BYTES
    to, out, scaled_address = start_of(logits), start_of(products), start_of(scaled)
    t = start
    while t < stop:
        count = min(BLOCK - t % BLOCK, stop - t)  # start at multiples of BLOCK: most groups of packed keys stay whole
        for first in range(0, rows, ROWS):
            four, place = start_of(queries) + first * query_step, out + first * out_step
            if packs is not None and layout == PACKED:
                logits_packed(
                    four, query_step, scaled_address, keys_at, key_step, head, key_form, t, width, count, to, logit_step
                )
            elif layout == BY_CHANNEL:
                logits_by_channel(four, query_step, keys_at + t * BYTES, key_step, width, count, to, logit_step)
            else:
                logits_by_token(four, query_step, keys_at + t * key_step, key_step, width, count, to, logit_step)
            for row in range(first, min(first + ROWS, rows)):
                line = logits[row - first]
                if softcap:
                    cap(line, outer)
                if kind == CAUSAL:
                    for unseen in range(max(last_columns[row] + 1 - column - t, 0), count):
                        line[unseen] = LEAST
                elif kind == BOOL:
                    hide_bool(line, count, masks[row] + (column + t) * mask_step, mask_step)
                elif kind == ADDITIVE:
                    add_mask(line, count, masks[row] + (column + t) * mask_step, mask_step)
                largest[row], shrink, more = turn_into_shares(line, count, largest[row])
                sums[row] = sums[row] * shrink + more
                if shrink != 1:
                    for c in range(products.shape[1]):
                        products[row, c] *= shrink
            if packs is not None and packed:
                add_packed_values(
                    to,
                    logit_step,
                    scaled_address,
                    values_at,
                    value_step,
                    head,
                    value_form,
                    before + t,
                    value_width,
                    count,
                    place,
                    out_step,
                )
            else:
                add_values(
                    to,
                    logit_step,
                    values_at + (before + t) * value_step,
                    value_step,
                    value_width,
                    count,
                    place,
                    out_step,
                )
        t += count


@inlined
def read_queries(source, head_step, row_step, channel_step, rows, length, width, scale, full):
    """Write one group's scaled queries as rows of `full`; its other entries are not touched."""
    for row in range(rows):
        start = source + row // length * head_step + row % length * row_step
        for c in range(width):
            full[row, c] = load_one(start + c * channel_step) * scale


@inlined
def gather(full, rows, width, indices, step, kept_count, narrow):
    """Gather the kept channels of queries; an index out of range gives NaN instead of reading other memory."""
    for i in range(kept_count):
        c = load_place(indices + i * step)
        exists = 0 <= c < width
        for row in range(rows):
            narrow[row, i] = full[row, c] if exists else NAN


@inlined
def address(place, b, h):
    """Return the address of one head's part of a tensor; `place` is its row of `places`."""
    return place[0] + b * place[1] + h * place[2]


# Plain loops instead of operations on whole arrays, here and below: numba takes seconds to compile each of those.
@inlined
def attend(taken, places, sizes, inner, softcap, outer, largest, sums, products, packs):
    """Process the tasks not taken yet; write to their rows of `largest`, `sums` and `products`.

    A task is a pair of sequence and KV head times the number of splits, plus the split. Threads that call this on the
    same arrays share the tasks; a slow thread takes fewer.

    Parameters
    ----------
    taken : (1,) int64
        Number of tasks taken so far.
    places : (8, 5) int64
        Address and strides of each tensor; of packed ones, address and step of the table, zero, address of the owners.
    sizes : (26,) int64
        KV heads, query heads of each, new tokens, width, kept channels, width of values, sinks, pruned tokens, tail,
        splits, columns per split, layout of the pruned keys, kind of mask; the form of packed keys: group size, bits,
        bytes of an element, how many of its bits are below those of the first plane, and how many more below those of
        each later one, whether zero points count levels; whether old values are packed, and the form of these.
    inner, softcap, outer : float32, bool, float32
        Queries are multiplied by `inner`; where `softcap` is, what `cap` needs.
    largest, sums : (all tasks, rows) float32
    products : (all tasks, rows padded, width of values padded) float32
    packs : None or bool
        None where neither keys nor values are packed: there is less to compile.
    """
    heads, group, length, width, kept_count, value_width, sinks, pruned, tail, splits, columns, layout, kind = sizes[
        :13
    ]
    key_form = sizes[13], sizes[14], sizes[15], sizes[16], sizes[17], sizes[18] != 0
    value_form = sizes[20], sizes[21], sizes[22], sizes[23], sizes[24], sizes[25] != 0
    every, rows, padded_rows = sinks + pruned + tail, group * length, products.shape[1]
    full = zeros((padded_rows, (width + LANES - 1) // LANES * LANES), np.float32)
    narrow = zeros((padded_rows, (kept_count + LANES - 1) // LANES * LANES), np.float32)
    logits = zeros((ROWS, BLOCK + LANES), np.float32)
    scaled = zeros((ROWS, max(narrow.shape[1], logits.shape[1])), np.float32)
    masks, last_columns = zeros((rows,), np.int64), zeros((rows,), np.int64)
    while True:
        number, pairs = add_one(taken), largest.shape[0] // splits
        if number >= largest.shape[0]:
            return
        # The same split of all heads one after the other: packed numbers of several heads share their bytes.
        pair, split = number % pairs, number // pairs
        task, b, h = pair * splits + split, pair // heads, pair % heads
        start, stop = split * columns, min((split + 1) * columns, every)
        for row in range(rows):
            largest[task, row], sums[task, row] = NOTHING, ZERO
        for row in range(padded_rows):
            for c in range(products.shape[2]):
                products[task, row, c] = ZERO
        first = address(places[QUERY], b, h * group)
        read_queries(first, places[QUERY, 2], places[QUERY, 3], places[QUERY, 4], rows, length, width, inner, full)
        gather(full, rows, width, address(places[KEPT], b, h), places[KEPT, 4], kept_count, narrow)
        for row in range(rows):
            masks[row] = address(places[MASK], b, h * group + row // length) + row % length * places[MASK, 3]
            last_columns[row] = every - length + row % length
        for region in (SINK_KEYS, PRUNED_KEYS, TAIL_KEYS):
            is_pruned, newest = region == PRUNED_KEYS, region == TAIL_KEYS
            key_layout = layout if is_pruned else BY_TOKEN
            queries, key_width = (narrow, kept_count) if is_pruned else (full, width)
            if newest:
                column, count = sinks + pruned, tail
            elif is_pruned:
                column, count = sinks, pruned
            else:
                column, count = 0, sinks
            stored, before = (TAIL_VALUES, 0) if newest else (OLD_VALUES, column)
            packed = not newest and sizes[19] != 0
            key_step = places[region, 4 if key_layout == BY_CHANNEL else 3]
            attend_region(
                queries,
                h,
                (address(places[region], b, h), key_step, key_layout, key_width, key_form),
                (address(places[stored], b, h), places[stored, 3], packed, value_width, value_form, before),
                max(start - column, 0),
                min(stop - column, count),
                rows,
                (kind, masks, places[MASK, 4], last_columns, column),
                softcap,
                outer,
                logits,
                scaled,
                (largest[task], sums[task], products[task]),
                packs,
            )


@inlined
def ends_at(table):
    """Maxima, sums and products of the tasks, of which the host made a table: see `attend`."""
    tasks, rows = table[7], table[8]
    return (
        array_at(table[4], (tasks, rows), np.float32),
        array_at(table[5], (tasks, rows), np.float32),
        array_at(table[6], (tasks, table[9], table[10]), np.float32),
    )


@inlined
def attend_to(data, packs):
    """Call `attend` with what a table of addresses and sizes says."""
    table = array_at(data, (12,), np.int64)
    taken, places, sizes = (
        array_at(table[0], (1,), np.int64),
        array_at(table[1], (8, 5), np.int64),
        array_at(table[2], (26,), np.int64),
    )
    scales = array_at(table[3], (3,), np.float32)
    largest, sums, products = ends_at(table)
    attend(taken, places, sizes, scales[0], scales[2] != 0, scales[1], largest, sums, products, packs)


@c_function("void(intp)")
def attend_at(data):
    """Call `attend_to`, for threads, where neither keys nor values are packed."""
    attend_to(data, None)


@c_function("void(intp)")
def attend_packed_at(data):
    """Call `attend_to`, for threads, where keys or values are packed."""
    attend_to(data, True)


@c_function("void(intp)")
def join_at(data):
    """Combine splits, weighted by their maxima and divided by the sum of weights; the output is (B, L, H_q, d_v)."""
    table = array_at(data, (12,), np.int64)
    sizes, (largest, sums, products) = array_at(table[2], (26,), np.int64), ends_at(table)
    heads, group, length, width, splits = sizes[0], sizes[1], sizes[2], sizes[5], sizes[9]
    pairs = largest.shape[0] // splits
    output = array_at(table[11], (pairs // heads, length, heads * group, width), np.float32)
    for pair in range(pairs):
        first, b, h = pair * splits, pair // heads, pair % heads
        for row in range(group * length):
            top, divisor = largest[first, row], ZERO
            for task in range(first + 1, first + splits):
                top = max(top, largest[task, row])
            for task in range(first, first + splits):
                divisor += np.float32(2.0) ** (largest[task, row] - top) * sums[task, row]
            to = output[b, row % length, h * group + row // length]
            for c in range(width):
                to[c] = ZERO
            for task in range(first, first + splits):
                weight = np.float32(2.0) ** (largest[task, row] - top) / divisor
                for c in range(width):
                    to[c] += weight * products[task, row, c]
