"""Attention of one new query over few of the stored tokens on the CPU: scores, choice, attention, bound in one loop.

`grace_opt.kernels.cache.reading.host` calls it; `reference` defines the result. A pair is one KV head of one sequence;
its tokens are scored, and read, in splits, so that few pairs keep many threads busy. Pages are counted by score, for
the whole group of query heads, which says up to which score they are read. Tokens are copied, a block at a time and in
their own order, to where the decoding kernel's loops (`grace_opt.kernels.cache.decode.cpu`) read them. Logits are in
powers of two; scores lack what all logits have in common. Bounds are joined in float64 with what `certificate` allows
for rounding.
"""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ...._shared.jit import c_function, inlined
from ...._shared.lanes import add_one, count_now
from ...._shared.memory import array_at, zeros
from ...decode.cpu import BLOCK, LOG2E, address
from ...decode.cpu.rows import BYTES
from ...decode.forms import LANES, ROWS
from ..forms import (
    ABOUT,
    BUCKETS,
    CHOSEN,
    CHOSEN_COUNT,
    DONE,
    FIRST_CHOSEN,
    GROUP,
    HEADS,
    JOINED,
    KEPT_COUNT,
    LOWER,
    MASK,
    MORE_CHOSEN,
    NORMS,
    NOTHING_LEFT,
    PAGES,
    PER_PAIR,
    PLACES,
    READ,
    REAL,
    SCALE,
    SCORED,
    SPLITS,
    SPLITS_READ,
    SPLITS_SCORED,
    STOP,
    WIDTH,
)
from .choice import take_pages
from .chosen import read_pages
from .dense import queries_of
from .phases import finish, prepare
from .scores import score
from .states import clear


@inlined
def attend_few(phase, taken, places, sizes, factors, least, output, bounds_out, work):
    """Attend to few tokens; threads that call this on the same arrays share the work.

    The pages of a pair are `SCORED`, in splits; then some are chosen and `READ`, in splits, and what was read is
    `JOINED`. Who ends the last split of a pair goes on with it, so that its choice goes beside other pairs' splits.

    Parameters
    ----------
    phase : int
        `SCORED`: all of this. To read more, first `MORE_CHOSEN` for all pairs, and then `READ`, to the end.
    taken : (1 + pairs * PER_PAIR,) int64
        Number of tasks taken so far, and of each pair splits and choices; zeros at first.
    places : (16, 5) int64
    sizes : (14,) int64
    factors : (3,) float64
        Scaling; epsilon and share expected, negative for none.
    least : (2, B) int64
        Number of pages to read at least, and how many more at a time.
    output : (B, H_q, d_v) float32
    bounds_out : (B, H_q) float64
    work : tuple
        What the phases leave to each other: scores (pairs, rows, pages), how many steps each page is below the first
        (pairs, pages) and numbers of pages at each (pairs, BUCKETS), the pages to read (pairs, pages), numbers of rows
        (pairs, 5, rows), counts (pairs, 4 + splits), and of every split and the dense tokens: largest, sums (pairs,
        splits, rows) and products (pairs, splits, rows, d_v).
    """
    expected, ranks, numbers_at, chosen, about, counts, largest, sums, products = work
    rows, width, kept_count, splits = sizes[GROUP], sizes[WIDTH], sizes[KEPT_COUNT], sizes[SPLITS]
    pairs, padded_rows = expected.shape[0], expected.shape[1]
    full = zeros((padded_rows, (width + LANES - 1) // LANES * LANES), np.float32)
    narrow = zeros((padded_rows, (kept_count + LANES - 1) // LANES * LANES), np.float32)
    half, masks = np.zeros_like(narrow), zeros((rows,), np.int64)
    logits = zeros((ROWS, BLOCK + LANES), np.float32)
    scaled = zeros((ROWS, max(narrow.shape[1], logits.shape[1])), np.float32)
    key_workspace = zeros((BLOCK, narrow.shape[1]), np.float32)
    value_workspace, tokens = zeros((BLOCK, products.shape[3]), np.float32), zeros((BLOCK,), np.int64)
    task, pair, split = NOTHING_LEFT, 0, 0
    while True:
        if task == NOTHING_LEFT:
            task, pair, split = next_task(phase, taken, pairs, splits)
            if task == NOTHING_LEFT:
                return
        b, h, count = pair // sizes[HEADS], pair % sizes[HEADS], counts[pair]
        own, now, task = taken[1 + pair * PER_PAIR :], task, NOTHING_LEFT
        for row in range(rows):
            masks[row] = address(places[MASK], b, h * rows + row)
        if now == SCORED:
            score(pair, split, places, sizes, factors, full, narrow, half, expected[pair])
            if add_one(own[SPLITS_SCORED:]) == splits - 1:
                task = FIRST_CHOSEN
        elif now in (FIRST_CHOSEN, MORE_CHOSEN):
            if now == FIRST_CHOSEN:
                clear(largest[pair], sums[pair], products[pair])
                for place in range(splits):
                    count[REAL + place] = 0
                state = largest[pair, splits], sums[pair, splits], products[pair, splits]
                parts = (logits, scaled), state, about[pair], expected[pair], ranks[pair], numbers_at[pair]
                count[STOP] = prepare(pair, places, sizes, factors, least, full, narrow, masks, *parts)
                count[DONE], count[NORMS] = 0, address(places[LOWER], b, h)
            count[CHOSEN_COUNT] = take_pages(
                count[STOP] - count[DONE], sizes[PAGES], ranks[pair], numbers_at[pair], chosen[pair]
            )
            count[DONE] = count[STOP]
            add_one(own[CHOSEN:])
        elif now == READ:
            start, stop = count[CHOSEN_COUNT] * split // splits, count[CHOSEN_COUNT] * (split + 1) // splits
            if start < stop:
                queries_of(pair, places, sizes, np.float32(factors[SCALE]) * LOG2E, full, narrow)
                state, mine = (largest[pair, split], sums[pair, split], products[pair, split]), chosen[pair, start:stop]
                workspaces = key_workspace, value_workspace, tokens, logits
                count[REAL + split] += read_pages(
                    narrow, rows, places, sizes, b, h, masks, mine, stop - start, expected[pair], workspaces, state
                )
            if add_one(own[SPLITS_READ:]) == splits - 1:
                task = JOINED
        else:
            states = largest[pair], sums[pair], products[pair]
            mine = about[pair], expected[pair]
            count[STOP] = finish(pair, sizes, factors, least, states, *mine, count, output, bounds_out)


@inlined
def next_task(phase, taken, pairs, splits):
    """Return what a thread does next, for which pair and split; wait while another chooses what is to be read."""
    number, count = add_one(taken), pairs * splits
    if phase == MORE_CHOSEN:
        return (phase, number, 0) if number < pairs else (NOTHING_LEFT, 0, 0)
    if phase == SCORED:
        if number < count:
            return SCORED, number // splits, number % splits
        number -= count
    if number >= count:
        return NOTHING_LEFT, 0, 0
    pair = number // splits
    while count_now(taken[1 + pair * PER_PAIR + CHOSEN :]) == 0:
        pass
    return READ, pair, number % splits


@c_function("void(intp)")
def attend_few_at(data):
    """Call `attend_few`, for threads: with the addresses of the arrays, and their sizes."""
    table = array_at(data, (24,), np.int64)
    batch, query_heads, width, heads = table[8], table[9], table[10], table[11]
    padded_rows, columns, pages, splits, wide = table[12], table[13], table[14], table[15], table[23]
    pairs, rows = batch * heads, query_heads // heads
    work = (
        array_at(table[16], (pairs, padded_rows, columns), np.float32),
        array_at(table[17], (pairs, pages), np.int16),
        array_at(table[18], (pairs, BUCKETS), np.int64),
        array_at(table[19], (pairs, pages), np.int64),
        array_at(table[20], (pairs, ABOUT, rows), np.float64),
        array_at(table[21], (pairs, REAL + splits), np.int64),
        array_at(table[22], (pairs, splits + 1, rows), np.float32),
        array_at(table[22] + pairs * (splits + 1) * rows * BYTES, (pairs, splits + 1, rows), np.float32),
        array_at(
            table[22] + 2 * pairs * (splits + 1) * rows * BYTES, (pairs, splits + 1, padded_rows, wide), np.float32
        ),
    )
    attend_few(
        table[7],
        array_at(table[0], (1 + pairs * PER_PAIR,), np.int64),
        array_at(table[1], (PLACES, 5), np.int64),
        array_at(table[2], (14,), np.int64),
        array_at(table[3], (3,), np.float64),
        array_at(table[4], (2, batch), np.int64),
        array_at(table[5], (batch, query_heads, width), np.float32),
        array_at(table[6], (batch, query_heads), np.float64),
        work,
    )
