"""Attention of one new query over few of the stored tokens on the CPU: scores, choice, attention, bound in one loop.

`grace_opt.kernels.cache.reading.host` calls it; `reference` defines the result. An item is one KV head of one sequence;
its tokens are scored, and read, in runs, so that few items keep many threads busy. Units are counted by score, for the
whole group of query heads, which says up to which score they are read. Tokens are copied, a block at a time and in
their own order, to where the decoding kernel's loops (`grace_opt.kernels.cache.decode.cpu`) read them. Logits
are in powers of two; scores lack what all logits have in common. Bounds are joined in float64 with what `certificate`
allows for rounding.
"""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ...._shared.jit import c_function, part
from ...._shared.lanes import add_one, count_now
from ...._shared.memory import array_at, zeros
from ...decode.cpu import BLOCK, LOG2E, address
from ...decode.cpu.rows import BYTES
from ...decode.forms import LANES, ROWS
from ..forms import (
    ABOUT,
    BUCKETS,
    CHOSEN,
    DONE,
    FIRST_CHOSEN,
    FOUND,
    GROUP,
    HEADS,
    JOINED,
    KEPT_COUNT,
    LOWER,
    MASK,
    MORE_CHOSEN,
    NORMS,
    NOTHING_LEFT,
    OF_ITEM,
    PLACES,
    READ,
    REAL,
    RUNS,
    RUNS_READ,
    RUNS_SCORED,
    SCALE,
    SCORED,
    STOP,
    UNITS,
    WIDTH,
)
from .choice import take_units
from .chosen import read_units
from .dense import queries_of
from .phases import finish, prepare
from .scores import score
from .states import clear


@part
def attend_few(phase, taken, places, sizes, factors, least, output, bounds_out, work):
    """Attend to few tokens; threads that call this on the same arrays share the work.

    The units of an item are `SCORED`, in runs; then some are chosen and `READ`, in runs, and what was read is `JOINED`.
    Who ends the last run of an item goes on with it, so that its choice goes beside other items' runs.

    Parameters
    ----------
    phase : int
        `SCORED`: all of this. To read more, first `MORE_CHOSEN` for all items, and then `READ`, to the end.
    taken : (1 + items * OF_ITEM,) int64
        Number of pieces taken so far, and of each item runs and choices; zeros at first.
    places : (16, 5) int64
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
    full = zeros((room, (width + LANES - 1) // LANES * LANES), np.float32)
    narrow = zeros((room, (kept + LANES - 1) // LANES * LANES), np.float32)
    half, masks = np.zeros_like(narrow), zeros((rows,), np.int64)
    logits = zeros((ROWS, BLOCK + LANES), np.float32)
    scaled = zeros((ROWS, max(narrow.shape[1], logits.shape[1])), np.float32)
    key_room = zeros((BLOCK, narrow.shape[1]), np.float32)
    value_room, tokens = zeros((BLOCK, products.shape[3]), np.float32), zeros((BLOCK,), np.int64)
    task, item, run = NOTHING_LEFT, 0, 0
    while True:
        if task == NOTHING_LEFT:
            task, item, run = next_task(phase, taken, items, runs)
            if task == NOTHING_LEFT:
                return
        b, h, count = item // sizes[HEADS], item % sizes[HEADS], counts[item]
        own, now, task = taken[1 + item * OF_ITEM :], task, NOTHING_LEFT
        for row in range(rows):
            masks[row] = address(places[MASK], b, h * rows + row)
        if now == SCORED:
            score(item, run, places, sizes, factors, full, narrow, half, expected[item])
            if add_one(own[RUNS_SCORED:]) == runs - 1:
                task = FIRST_CHOSEN
        elif now in (FIRST_CHOSEN, MORE_CHOSEN):
            if now == FIRST_CHOSEN:
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
            add_one(own[CHOSEN:])
        elif now == READ:
            start, stop = count[FOUND] * run // runs, count[FOUND] * (run + 1) // runs
            if start < stop:
                queries_of(item, places, sizes, np.float32(factors[SCALE]) * LOG2E, full, narrow)
                state, mine = (largest[item, run], sums[item, run], products[item, run]), chosen[item, start:stop]
                rooms = key_room, value_room, tokens, logits
                count[REAL + run] += read_units(
                    narrow, rows, places, sizes, b, h, masks, mine, stop - start, expected[item], rooms, state
                )
            if add_one(own[RUNS_READ:]) == runs - 1:
                task = JOINED
        else:
            states = largest[item], sums[item], products[item]
            mine = about[item], expected[item]
            count[STOP] = finish(item, sizes, factors, least, states, *mine, count, output, bounds_out)


@part
def next_task(phase, taken, items, runs):
    """What a thread does next, for which item and run; waits while another thread chooses what is to be read."""
    piece, pieces = add_one(taken), items * runs
    if phase == MORE_CHOSEN:
        return (phase, piece, 0) if piece < items else (NOTHING_LEFT, 0, 0)
    if phase == SCORED:
        if piece < pieces:
            return SCORED, piece // runs, piece % runs
        piece -= pieces
    if piece >= pieces:
        return NOTHING_LEFT, 0, 0
    item = piece // runs
    while count_now(taken[1 + item * OF_ITEM + CHOSEN :]) == 0:
        pass
    return READ, item, piece % runs


@c_function("void(intp)")
def attend_few_at(data):
    """`attend_few`, as threads call it: with the addresses of the arrays, and their sizes."""
    given = array_at(data, (24,), np.int64)
    batch, query_heads, width, heads = given[8], given[9], given[10], given[11]
    room, columns, units, runs, wide = given[12], given[13], given[14], given[15], given[23]
    items, rows = batch * heads, query_heads // heads
    work = (
        array_at(given[16], (items, room, columns), np.float32),
        array_at(given[17], (items, units), np.int16),
        array_at(given[18], (items, BUCKETS), np.int64),
        array_at(given[19], (items, units), np.int64),
        array_at(given[20], (items, ABOUT, rows), np.float64),
        array_at(given[21], (items, REAL + runs), np.int64),
        array_at(given[22], (items, runs + 1, rows), np.float32),
        array_at(given[22] + items * (runs + 1) * rows * BYTES, (items, runs + 1, rows), np.float32),
        array_at(given[22] + 2 * items * (runs + 1) * rows * BYTES, (items, runs + 1, room, wide), np.float32),
    )
    attend_few(
        given[7],
        array_at(given[0], (1 + items * OF_ITEM,), np.int64),
        array_at(given[1], (PLACES, 5), np.int64),
        array_at(given[2], (14,), np.int64),
        array_at(given[3], (3,), np.float64),
        array_at(given[4], (2, batch), np.int64),
        array_at(given[5], (batch, query_heads, width), np.float32),
        array_at(given[6], (batch, query_heads), np.float64),
        work,
    )
