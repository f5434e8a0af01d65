"""Attention of one new query over a sample of the stored tokens on the CPU: codes, draws, attention, bound in one loop.

`grace_opt.kernels.cache.reading.sampled_host` calls it; `sampled` defines the result. An item is one KV head of one
sequence, and its tokens are drawn and read in runs, as in `grace_opt.kernels.cache.reading.cpu`. First the queries are
hashed, in runs of hyperplanes, and dense tokens read; then each run compares the codes of 256 tokens at a time, adds up
the bounds of those that a query head has not drawn, and attends to those that any has; then the runs are joined.
"""

from __future__ import annotations

import math

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ...._shared.bits import WORDS
from ...._shared.jit import c_function, part
from ...._shared.lanes import add_one, load_one
from ...._shared.limits import BITS as TOKENS
from ...._shared.memory import array_at, zeros
from ...decode.cpu import BLOCK, LOG2E, ZERO, address
from ...decode.cpu.rows import BYTES
from ...decode.forms import LANES, ROWS
from ..forms import (
    ABOUT,
    AROUND,
    GROUP,
    HASHED,
    HEADS,
    JOINED,
    KEPT_COUNT,
    LEVELS,
    LONGEST,
    LOWER,
    MASK,
    MEAN,
    NORMALS,
    OLD,
    PLACES,
    REACH,
    RUNS,
    SCALE,
    SIDES,
    SIGN,
    SINKS,
    TAIL,
    TERMS,
    UPPER,
    VALUE_WIDTH,
    WIDTH,
)
from .bounds import BITS, bound_of, terms_of
from .codes import NONE, hash_query
from .dense import attend_dense, queries_of
from .draws import draw
from .states import clear, join_runs, joined, log_add


@part
def plain_queries(item, places, sizes, sign, means, full, narrow, hashed):
    """Write an item's queries as keys have them, in float64 and not scaled, with their norms and products with the mean
    of the keys."""
    queries, lengths, shifts = hashed
    queries_of(item, places, sizes, sign, full, narrow)
    for row in range(sizes[GROUP]):
        square = shift = 0.0
        for c in range(sizes[KEPT_COUNT]):
            number = np.float64(narrow[row, c])
            queries[row, c] = number
            square += number * number
            shift += number * means[c]
        lengths[row], shifts[row] = math.sqrt(square), shift


@part
def read_dense(item, places, sizes, factors, masks, full, narrow, hashed, rooms, states, about, plain, rests):
    """Attend to the dense tokens, clear what runs add up, and write what all of an item's rows have."""
    largest, sums, products = states
    rows, kept, runs = sizes[GROUP], sizes[KEPT_COUNT], sizes[RUNS]
    scale = factors[SCALE] * BITS
    clear(largest, sums, products)
    reach_around, reach = zeros((full.shape[1],), np.float32), zeros((narrow.shape[1],), np.float32)
    b, h = item // sizes[HEADS], item % sizes[HEADS]
    for c in range(kept):
        reach[c] = load_one(address(places[REACH], b, h) + c * BYTES)
    longest = array_at(address(places[LONGEST], b, h), (1,), np.float64)[0]
    for row in range(rows):
        about[TERMS, row] = scale * (2 * terms_of(narrow[row], reach, kept) + hashed[1][row] * longest)
        about[MEAN, row] = scale * hashed[2][row]
    queries_of(item, places, sizes, np.float32(factors[SIGN] * factors[SCALE]) * LOG2E, full, narrow)
    state = largest[runs], sums[runs], products[runs]
    attend_dense(full, places, sizes, b, h, masks, rooms, state, reach_around)
    for row in range(rows):
        about[AROUND, row] = terms_of(full[row], reach_around, sizes[WIDTH])
        plain[runs, row] = sums[runs, row]
        for run in range(runs):
            plain[run, row], rests[run, row] = ZERO, -np.inf


@part
def finish_sample(item, sizes, states, about, plain, rests, output, bounds_out):
    """Join the runs of an item, and bound what was not read."""
    largest, sums, products = states
    b, h, rows = item // sizes[HEADS], item % sizes[HEADS], sizes[GROUP]
    every = sizes[SINKS] + sizes[OLD] + sizes[TAIL]
    for row in range(rows):
        place = h * rows + row
        top, _ = join_runs(largest, sums, products, row, sizes[VALUE_WIDTH], output[b, place])
        rest, read = -np.inf, ZERO
        for run in range(sizes[RUNS]):
            rest = log_add(rest, rests[run, row])
        for run in range(largest.shape[0]):
            if sums[run, row] != 0:
                read += np.float32(2.0) ** (largest[run, row] - top) * plain[run, row]
        terms = about[TERMS, row]
        most = max(terms, about[AROUND, row])
        found = bound_of(rest + about[MEAN, row], joined(top, read), most, terms, sizes[WIDTH], every)
        bounds_out[b, place] = found


@part
def attend_sample(phase, taken, places, sizes, factors, cosines, output, bounds_out, work):
    """Process the pieces of a phase that are not taken yet; threads that call this on the same arrays share them.

    Parameters
    ----------
    phase : int
        `HASHED`, `DRAWN`, `JOINED`.
    taken : (1,) int64
        Number of pieces of this phase taken so far.
    places : (16, 5) int64
    sizes : (14,) int64
    factors : (2,) float64
        Absolute value and sign of the scaling.
    cosines : (B, L K + 1) float64
    output : (B, H_q, d_v) float32
    bounds_out : (B, H_q) float64
    work : tuple
        What the phases leave to each other: bits of the queries (items, rows, planes), numbers of rows (items, 5,
        rows), logarithms of bounds (items, runs, rows), tokens drawn (items, runs), and of every run and the dense
        tokens: largest, sums, sums without the probabilities (items, runs, rows) and products (items, runs, rows, d_v).
    """
    words, about, rests, drawn, largest, sums, plain, products = work
    rows, width, kept, runs = sizes[GROUP], sizes[WIDTH], sizes[KEPT_COUNT], sizes[RUNS]
    items, room, value_width = words.shape[0], products.shape[2], products.shape[3]
    full = zeros((room, (width + LANES - 1) // LANES * LANES), np.float32)
    narrow = zeros((room, (kept + LANES - 1) // LANES * LANES), np.float32)
    hashed = zeros((rows, kept), np.float64), zeros((rows,), np.float64), zeros((rows,), np.float64)
    masks, logits = zeros((rows,), np.int64), zeros((ROWS, BLOCK + LANES), np.float32)
    scaled = zeros((ROWS, max(narrow.shape[1], logits.shape[1])), np.float32)
    reading = (
        zeros((BLOCK, narrow.shape[1]), np.float32),
        zeros((BLOCK, value_width), np.float32),
        logits,
        zeros((BLOCK,), np.float32),
    )
    levels, count = 0, sizes[SIDES]
    while count:
        levels, count = levels + 1, count // 2
    comparing = (
        zeros((rows, WORDS), np.int32),
        zeros((WORDS,), np.int32),
        zeros((levels, WORDS), np.int32),
        zeros((TOKENS,), np.int32),
        zeros((TOKENS + LANES,), np.float32),
        zeros((rows,), np.float32),
        zeros((rows,), np.float32),
        zeros((BLOCK + TOKENS,), np.int64),
        zeros((BLOCK + TOKENS,), np.int64),
    )
    sides = cosines.shape[1] - 1
    room64 = zeros((sides,), np.float64)
    pieces = items if phase == JOINED else items * runs
    while True:
        piece = add_one(taken)
        if piece >= pieces:
            return
        item, run = (piece, 0) if phase == JOINED else (piece // runs, piece % runs)
        states = largest[item], sums[item], products[item]
        b, h = item // sizes[HEADS], item % sizes[HEADS]
        if phase == JOINED:
            finish_sample(item, sizes, states, about[item], plain[item], rests[item], output, bounds_out)
            continue
        for row in range(rows):
            masks[row] = address(places[MASK], b, h * rows + row)
        means = array_at(address(places[UPPER], b, h), (kept,), np.float64)
        plain_queries(item, places, sizes, np.float32(factors[SIGN]), means, full, narrow, hashed)
        if phase == HASHED:
            start, stop = sides * run // runs, sides * (run + 1) // runs
            for row in range(rows):
                normals = places[NORMALS, 0] + start * BYTES
                hash_query(hashed[0][row], normals, sides * BYTES, stop - start, room64, words[item, row, start:])
                for j in range(sides, sizes[SIDES]):  # of no plane: as in the codes
                    words[item, row, j] = NONE
            if run == 0:
                mine = states, about[item], plain[item], rests[item]
                read_dense(item, places, sizes, factors, masks, full, narrow, hashed, (logits, scaled), *mine)
        else:
            blocks = (sizes[OLD] + TOKENS - 1) // TOKENS
            state = largest[item, run], sums[item, run], products[item, run], plain[item, run]
            drawn[item, run] = draw(
                (b, h),
                blocks * run // runs,
                blocks * (run + 1) // runs,
                places,
                sizes,
                factors[SCALE] * BITS,
                masks,
                words[item],
                cosines[b],
                array_at(address(places[LOWER], b, h), (sizes[OLD],), np.float64),
                means,
                hashed,
                rests[item, run],
                (reading, comparing),
                state,
            )


@c_function("void(intp)")
def attend_sample_at(data):
    """`attend_sample`, as threads call it: with the addresses of the arrays, and their sizes."""
    given = array_at(data, (20,), np.int64)
    batch, query_heads, width, heads, room, runs, wide = (
        given[7],
        given[8],
        given[9],
        given[10],
        given[11],
        given[12],
        given[13],
    )
    items, rows, sizes = batch * heads, query_heads // heads, array_at(given[2], (14,), np.int64)
    places, sides, bits = array_at(given[1], (PLACES, 5), np.int64), sizes[SIDES], given[14]
    count = items * (runs + 1) * rows
    work = (
        array_at(given[15], (items, rows, sides), np.int32),
        array_at(given[16], (items, ABOUT, rows), np.float64),
        array_at(given[17], (items, runs, rows), np.float64),
        array_at(given[18], (items, runs), np.int64),
        array_at(given[19], (items, runs + 1, rows), np.float32),
        array_at(given[19] + count * BYTES, (items, runs + 1, rows), np.float32),
        array_at(given[19] + 2 * count * BYTES, (items, runs + 1, rows), np.float32),
        array_at(given[19] + 3 * count * BYTES, (items, runs + 1, room, wide), np.float32),
    )
    attend_sample(
        given[6],
        array_at(given[0], (1,), np.int64),
        places,
        sizes,
        array_at(given[3], (2,), np.float64),
        array_at(places[LEVELS, 0], (batch, bits + 1), np.float64),
        array_at(given[4], (batch, query_heads, width), np.float32),
        array_at(given[5], (batch, query_heads), np.float64),
        work,
    )
