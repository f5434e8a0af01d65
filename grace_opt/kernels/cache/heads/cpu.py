"""Whole heads, compiled: a thread takes one head after the other, and holds the coordinates of one."""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ..._shared.jit import c_function, inlined
from ..._shared.lanes import add_one, load_one
from ..._shared.memory import array_at, empty, start_of, view, zeros
from ..._shared.products import BYTES, ROWS, TILE, fill_tile, multiply
from ..._shared.whole import sorted_places
from ...steps.cpu import hulls, spend
from ..coding.cpu import code, fit, largest_bits, mean, weighted
from ..coding.reference import LARGEST
from . import forms

#: Below, float16 has fewer digits: a multiple of its smallest number.
LEAST_NORMAL = np.float32(2.0**-14)
#: Adding this to a smaller number, and taking it away, rounds to a multiple of float16's smallest number.
MAGIC = np.float32(0.75)
MOST = np.float32(LARGEST)
#: Numbers in a row of the codebooks.
MOST_LEVELS = 256
#: The bits that a float16 does not have of a float32, and half of their worth less one.
SPARE, HALF = np.int32(13), np.int32(0xFFF)


@inlined
def round_to_half(numbers):
    """Round to the nearest float16, ties to even; what is too large becomes the largest."""
    bits = view(numbers, np.int32)
    for i in range(numbers.shape[0]):
        x = min(max(numbers[i], -MOST), MOST)
        if abs(x) < LEAST_NORMAL:
            numbers[i] = (x + MAGIC) - MAGIC
        else:
            numbers[i] = x
            rounded = bits[i] + HALF + ((bits[i] >> SPARE) & np.int32(1))
            bits[i] = (rounded >> SPARE) << SPARE


@inlined
def make_coordinates(tensor, token_step, order, encode, block, tile):
    """Fill ``block`` (d, …), by channel, with the tokens at an address in an order, times ``encode`` (…, d)."""
    width, step, tokens = encode.shape[1], block.shape[1] * BYTES, empty((TILE,), np.int64)
    for first in range(0, order.shape[0], TILE):
        for i in range(TILE):  # behind the last token comes it again: nobody reads these columns of the block
            tokens[i] = tensor + order[min(first + i, order.shape[0] - 1)] * token_step
        fill_tile(tokens, width, start_of(tile))
        for row in range(0, encode.shape[0], ROWS):
            target = start_of(block) + row * step + first * BYTES
            multiply(start_of(encode[row]), width * BYTES, start_of(tile), width, target, step)


@inlined(error_model="numpy")
def divide(squares, energy, distortions, costs, bits, levels):
    """Fill the levels (C, d) of a head that may cost so many bits."""
    classes, width = squares.shape
    groups, count = classes * width, distortions.shape[0]
    losses, prices = empty((1, groups, count), np.float64), empty((1, groups, count), np.float64)
    admissible = empty((1, groups, count), np.bool_)
    for c in range(classes):
        for j in range(width):
            loss = squares[c, j] * energy[j]
            for b in range(count):
                losses[0, c * width + j, b] = loss * distortions[b]
                prices[0, c * width + j, b] = costs[c, b]
                admissible[0, c * width + j, b] = True
    along = zeros((1, groups, count), np.int64)
    added, slopes = zeros((1, groups, count - 1), np.float64), zeros((1, groups, count - 1), np.float64)
    hulls(losses, prices, admissible, along, added, slopes)
    falling = slopes.reshape(groups * (count - 1))
    for place in range(len(falling)):
        falling[place] = -falling[place]
    order = sorted_places(falling).reshape(1, groups * (count - 1))
    for place in range(len(falling)):
        falling[place] = -falling[place]
    limits, price = empty((1,), np.float64), zeros((1,), np.float64)
    limits[0] = bits
    chosen = zeros((1, groups), np.int64)
    spend(losses, prices, admissible, limits, along, added, slopes, order, chosen, price)
    for c in range(classes):
        for j in range(width):
            levels[c, j] = chosen[0, c * width + j]


@inlined(error_model="numpy")
def head_scale_of(largest, small, large, lowest):
    """Return 1, or the power of two that brings numbers that are too large or too small into float16."""
    if small <= largest <= large:
        return np.float32(1.0)
    if largest == 0:
        return np.float32(2.0**lowest)
    beyond = np.ceil(np.log2(largest / large))
    return np.float32(2.0 ** max(beyond, np.float32(lowest)))


@inlined(error_model="numpy")
def code_head(block, weights, energy, bits, tables, outputs):
    """Code the coordinates of a head; return its scale."""
    counts, costs, widths, distortions, small, large, lowest, books, edges, even, trellis = tables
    levels, means, scales, planes = outputs
    classes, width = levels.shape
    large_bits, squares = zeros((1,), np.int32), empty((classes, width), np.float64)
    length = weights.shape[0]
    for j in range(width):
        row = block[j][:length]
        large_bits[0] = max(large_bits[0], largest_bits(row))
        middle, first = mean(row), 0
        for c in range(classes):
            stop = first + counts[c]
            squares[c, j] = weighted(row[first:stop], middle, weights[first:stop])
            first = stop
    largest = load_one(start_of(large_bits))
    relative = np.float64(largest) if largest > 0 else 1.0
    for c in range(classes):
        for j in range(width):
            squares[c, j] /= relative * relative
    divide(squares, energy, distortions, costs, bits, levels)
    head_scale = head_scale_of(largest, small, large, lowest)
    if head_scale != 1:
        for j in range(width):
            for t in range(length):
                block[j, t] /= head_scale
    for j in range(width):
        means[j] = np.float32(mean(block[j][:length]))
    round_to_half(means)
    wide = empty((classes, width), np.uint8)
    for c in range(classes):
        for j in range(width):
            wide[c, j] = widths[levels[c, j]]
    rows = block[:width]
    fit(rows, means, wide, counts, books, edges, even, scales)
    for c in range(classes):
        round_to_half(scales[c])
    code(rows, means, wide, counts, edges, trellis, even, scales, planes)
    return head_scale


@inlined
def code_heads(taken, records, shared):
    """Code the heads not taken yet; threads that call this on the same arrays share them.

    Parameters
    ----------
    taken : (2,) int64
        Number of heads taken so far, and of threads.
    records : (K, 17) int64
        See `forms`.
    shared : (14,) int64
    """
    if add_one(taken[1:]) >= forms.AT_ONCE:
        return
    classes, choices, books = shared[forms.CLASSES], shared[forms.CHOICES], shared[forms.ROWS_OF_BOOKS]
    limits = array_at(shared[forms.RANGE], (2,), np.float32)
    tables = (
        array_at(shared[forms.COUNTS], (classes,), np.int64),
        array_at(shared[forms.COSTS], (classes, choices), np.float64),
        array_at(shared[forms.WIDTHS], (choices,), np.uint8),
        array_at(shared[forms.DISTORTIONS], (choices,), np.float64),
        limits[0],
        limits[1],
        shared[forms.LOWEST],
        array_at(shared[forms.BOOKS], (books, MOST_LEVELS), np.float32),
        array_at(shared[forms.EDGES], (books, MOST_LEVELS - 1), np.float32),
        shared[forms.EVEN],
        array_at(shared[forms.TRELLIS], (shared[forms.ROWS_OF_TRELLIS], MOST_LEVELS), np.float32),
    )
    size, widest = 0, 0
    for record in records:
        rows = (record[forms.WIDTH] + ROWS - 1) // ROWS * ROWS
        size = max(size, rows * ((record[forms.TOKENS] + TILE - 1) // TILE * TILE))
        widest = max(widest, record[forms.WIDTH])
    workspace, tile = empty((size,), np.float32), empty((widest, TILE), np.float32)
    while True:
        head, kind = add_one(taken), 0
        while kind < records.shape[0] and head >= records[kind, forms.HEADS]:
            head -= records[kind, forms.HEADS]
            kind += 1
        if kind == records.shape[0]:
            return
        record = records[kind]
        heads, tokens, width = record[forms.HEADS], record[forms.TOKENS], record[forms.WIDTH]
        rows, columns = (width + ROWS - 1) // ROWS * ROWS, (tokens + TILE - 1) // TILE * TILE
        block = workspace[: rows * columns].reshape(rows, columns)
        encode = array_at(record[forms.ENCODE], (heads, rows, width), np.float32)[head]
        order = array_at(record[forms.ORDER], (heads, tokens), np.int64)[head]
        address = record[forms.TENSOR] + head * record[forms.HEAD_STEP]
        make_coordinates(address, record[forms.TOKEN_STEP], order, encode, block, tile)
        outputs = (
            array_at(record[forms.LEVELS], (heads, classes, width), np.int64)[head],
            array_at(record[forms.MEANS], (heads, width), np.float32)[head],
            array_at(record[forms.SCALES], (heads, classes, width), np.float32)[head],
            array_at(record[forms.PLANES], (heads, record[forms.CAPACITY]), np.uint8)[head],
        )
        weights = array_at(record[forms.WEIGHTS], (heads, tokens), np.float32)[head]
        energy = array_at(record[forms.ENERGY], (heads, width), np.float64)[head]
        bits = array_at(record[forms.BITS], (heads,), np.float64)[head]
        head_scale = array_at(record[forms.HEAD_SCALE], (heads,), np.float32)
        head_scale[head] = code_head(block, weights, energy, bits, tables, outputs)


@c_function("void(intp)")
def code_heads_at(data):
    """Call `code_heads`, for threads: with the addresses of the arrays, and the number of records."""
    table = array_at(data, (4,), np.int64)
    code_heads(
        array_at(table[0], (2,), np.int64),
        array_at(table[1], (table[3], 17), np.int64),
        array_at(table[2], (14,), np.int64),
    )
