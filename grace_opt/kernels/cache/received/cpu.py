"""Attention received, compiled: logits, shares and sums of a few queries at a time, in vectors of keys."""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ..._shared.jit import c_function, inlined
from ..._shared.lanes import (
    WIDEST,
    add_one,
    exp2,
    greater,
    greatest,
    load_widest,
    multiply_add,
    spread_widest,
    store,
    total,
)
from ..._shared.memory import array_at, empty, start_of
from ..._shared.products import BYTES, ROWS, TILE, WHOLE, fill_tile, multiply
from .forms import ROWS_AT_ONCE

load, spread = load_widest, spread_widest
NOTHING, ZERO = np.float32(-np.inf), np.float32(0.0)


@inlined
def exponentials(address, size):
    """Replace a row of logits by powers of two, at most 1, and return their sum."""
    best = spread(NOTHING)
    for place in range(address, address + size, WHOLE):
        best = greater(best, load(place))
    shift, sums = spread(greatest(best)), spread(ZERO)
    for place in range(address, address + size, WHOLE):
        power = exp2(load(place) - shift)
        store(place, power)
        sums = sums + power
    return total(sums)


@inlined
def add_four(address, step, size, weights, inverse, first, second):
    """Add the four rows' p and p², times their weights, to the sums."""
    i0, i1, i2, i3 = spread(inverse[0]), spread(inverse[1]), spread(inverse[2]), spread(inverse[3])
    w0, w1, w2, w3 = spread(weights[0]), spread(weights[1]), spread(weights[2]), spread(weights[3])
    for place in range(0, size, WHOLE):
        row = address + place
        p0, p1 = load(row) * i0, load(row + step) * i1
        p2, p3 = load(row + 2 * step) * i2, load(row + 3 * step) * i3
        q0, q1, q2, q3 = p0 * w0, p1 * w1, p2 * w2, p3 * w3
        store(first + place, load(first + place) + ((q0 + q1) + (q2 + q3)))
        sums = multiply_add(q0, p0, multiply_add(q1, p1, load(second + place)))
        store(second + place, multiply_add(q2, p2, multiply_add(q3, p3, sums)))


@inlined
def add_received(taken, queries, weights, tiles, sums, length, share):
    """Process the tasks not taken yet; threads that call this on the same arrays share them.

    Parameters
    ----------
    taken : (1,) int64
        Number of tasks taken so far.
    queries : (R, d) float32
        R is a multiple of `ROWS`; logits are powers of two.
    weights : (R,) float32
    tiles : (N, d, TILE) float32
        The keys, by channel within each tile.
    sums : (tasks, 2, N * TILE) float32
        At first zero; p and p².
    length : int
        Number of keys; nobody reads what the last tile has behind them.
    share : int
        Number of queries of a task, a multiple of `ROWS`.
    """
    rows, width = queries.shape
    query_step, step, size = width * BYTES, sums.shape[2] * BYTES, (length + WIDEST - 1) // WIDEST * WHOLE
    logits = empty((ROWS_AT_ONCE, sums.shape[2]), np.float32)
    inverse = empty((ROWS,), np.float32)
    tile_size = width * TILE * BYTES
    workspace = start_of(logits)
    while True:
        task = add_one(taken)
        if task >= sums.shape[0]:
            return
        first, second = start_of(sums[task, 0]), start_of(sums[task, 1])
        stop = min((task + 1) * share, rows)
        for start in range(task * share, stop, ROWS_AT_ONCE):
            here = min(ROWS_AT_ONCE, stop - start)
            for n in range(tiles.shape[0]):
                keys, out = start_of(tiles) + n * tile_size, workspace + n * TILE * BYTES
                for row in range(0, here, ROWS):
                    four = start_of(queries) + (start + row) * query_step
                    multiply(four, query_step, keys, width, out + row * step, step)
            for row in range(0, here, ROWS):
                for one in range(ROWS):
                    for t in range(length, size // BYTES):
                        logits[row + one, t] = NOTHING
                    inverse[one] = np.float32(1.0) / exponentials(workspace + (row + one) * step, size)
                add_four(workspace + row * step, step, size, weights[start + row :], inverse, first, second)


@c_function("void(intp)")
def fill_tiles_at(data):
    """Fill the tiles not taken yet; threads that call this on the same data share them.

    Given are the addresses of the number of tiles taken so far, of the tiles ``(N, d, TILE)`` float32 and of the keys;
    then d, N, the number of keys, and how many bytes one is behind the one before.
    """
    table = array_at(data, (7,), np.int64)
    taken, width, tiles, length, step = array_at(table[0], (1,), np.int64), table[3], table[4], table[5], table[6]
    rows = empty((TILE,), np.int64)
    while True:
        tile = add_one(taken)
        if tile >= tiles:
            return
        for i in range(TILE):
            rows[i] = table[2] + min(tile * TILE + i, length - 1) * step
        fill_tile(rows, width, table[1] + tile * width * TILE * BYTES)


@c_function("void(intp)")
def add_received_at(data):
    """Call `add_received`, for threads: with the addresses of the arrays, and their sizes."""
    table = array_at(data, (11,), np.int64)
    rows, width, tiles, tasks = table[5], table[6], table[7], table[8]
    add_received(
        array_at(table[0], (1,), np.int64),
        array_at(table[1], (rows, width), np.float32),
        array_at(table[2], (rows,), np.float32),
        array_at(table[3], (tiles, width, TILE), np.float32),
        array_at(table[4], (tasks, 2, tiles * TILE), np.float32),
        table[9],
        table[10],
    )
