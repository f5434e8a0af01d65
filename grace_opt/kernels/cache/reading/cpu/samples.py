"""Attention of one new query over a sample of the stored tokens on the CPU: codes, draws, attention, bound in one loop.

`grace_opt.kernels.cache.reading.sampled_host` calls it; `sampled` defines the result. A pair is one KV head of one
sequence, and its tokens are drawn and read in splits, as in `grace_opt.kernels.cache.reading.cpu`. First the queries
are hashed, some hyperplanes at a time, and dense tokens read; then each split compares the codes of 256 tokens at a
time, adds up the bounds of those that a query head has not drawn, and attends to those that any has; then the splits
are joined.
"""

from __future__ import annotations

import math

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ...._shared.bits import WORDS
from ...._shared.jit import c_function, inlined
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
    SCALE,
    SIDES,
    SIGN,
    SINKS,
    SPLITS,
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
from .states import clear, join_splits, joined, log_add


@inlined
def plain_queries(pair, places, sizes, sign, means, full, narrow, hashed):
    """Write a pair's queries as keys have them, in float64 and not scaled, with their norms and products with the mean
    of the keys."""
    queries, lengths, shifts = hashed
    queries_of(pair, places, sizes, sign, full, narrow)
    for row in range(sizes[GROUP]):
        square = shift = 0.0
        for c in range(sizes[KEPT_COUNT]):
            number = np.float64(narrow[row, c])
            queries[row, c] = number
            square += number * number
            shift += number * means[c]
        lengths[row], shifts[row] = math.sqrt(square), shift


@inlined
def read_dense(pair, places, sizes, factors, masks, full, narrow, hashed, workspaces, states, about, plain, rests):
    """Attend to the dense tokens, clear what splits add up, and write what all of a pair's rows have."""
    largest, sums, products = states
    rows, kept_count, splits = sizes[GROUP], sizes[KEPT_COUNT], sizes[SPLITS]
    scale = factors[SCALE] * BITS
    clear(largest, sums, products)
    reach_around, reach = zeros((full.shape[1],), np.float32), zeros((narrow.shape[1],), np.float32)
    b, h = pair // sizes[HEADS], pair % sizes[HEADS]
    for c in range(kept_count):
        reach[c] = load_one(address(places[REACH], b, h) + c * BYTES)
    longest = array_at(address(places[LONGEST], b, h), (1,), np.float64)[0]
    for row in range(rows):
        about[TERMS, row] = scale * (2 * terms_of(narrow[row], reach, kept_count) + hashed[1][row] * longest)
        about[MEAN, row] = scale * hashed[2][row]
    queries_of(pair, places, sizes, np.float32(factors[SIGN] * factors[SCALE]) * LOG2E, full, narrow)
    state = largest[splits], sums[splits], products[splits]
    attend_dense(full, places, sizes, b, h, masks, workspaces, state, reach_around)
    for row in range(rows):
        about[AROUND, row] = terms_of(full[row], reach_around, sizes[WIDTH])
        plain[splits, row] = sums[splits, row]
        for split in range(splits):
            plain[split, row], rests[split, row] = ZERO, -np.inf


@inlined
def finish_sample(pair, sizes, states, about, plain, rests, output, bounds_out):
    """Join the splits of a pair, and bound what was not read."""
    largest, sums, products = states
    b, h, rows = pair // sizes[HEADS], pair % sizes[HEADS], sizes[GROUP]
    every = sizes[SINKS] + sizes[OLD] + sizes[TAIL]
    for row in range(rows):
        place = h * rows + row
        top, _ = join_splits(largest, sums, products, row, sizes[VALUE_WIDTH], output[b, place])
        rest, read = -np.inf, ZERO
        for split in range(sizes[SPLITS]):
            rest = log_add(rest, rests[split, row])
        for split in range(largest.shape[0]):
            if sums[split, row] != 0:
                read += np.float32(2.0) ** (largest[split, row] - top) * plain[split, row]
        terms = about[TERMS, row]
        most = max(terms, about[AROUND, row])
        bound = bound_of(rest + about[MEAN, row], joined(top, read), most, terms, sizes[WIDTH], every)
        bounds_out[b, place] = bound


@inlined
def attend_sample(phase, taken, places, sizes, factors, cosines, output, bounds_out, work):
    """Process the tasks of a phase that are not taken yet; threads that call this on the same arrays share them.

    Parameters
    ----------
    phase : int
        `HASHED`, `DRAWN`, `JOINED`.
    taken : (1,) int64
        Number of tasks of this phase taken so far.
    places : (16, 5) int64
    sizes : (14,) int64
    factors : (2,) float64
        Absolute value and sign of the scaling.
    cosines : (B, L K + 1) float64
    output : (B, H_q, d_v) float32
    bounds_out : (B, H_q) float64
    work : tuple
        What the phases leave to each other: bits of the queries (pairs, rows, planes), numbers of rows (pairs, 5,
        rows), logarithms of bounds (pairs, splits, rows), tokens drawn (pairs, splits), and of every split and the
        dense tokens: largest, sums, sums without the probabilities (pairs, splits, rows) and products (pairs, splits,
        rows, d_v).
    """
    words, about, rests, drawn, largest, sums, plain, products = work
    rows, width, kept_count, splits = sizes[GROUP], sizes[WIDTH], sizes[KEPT_COUNT], sizes[SPLITS]
    pairs, padded_rows, value_width = words.shape[0], products.shape[2], products.shape[3]
    full = zeros((padded_rows, (width + LANES - 1) // LANES * LANES), np.float32)
    narrow = zeros((padded_rows, (kept_count + LANES - 1) // LANES * LANES), np.float32)
    hashed = zeros((rows, kept_count), np.float64), zeros((rows,), np.float64), zeros((rows,), np.float64)
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
    hash_workspace = zeros((sides,), np.float64)
    tasks = pairs if phase == JOINED else pairs * splits
    while True:
        task = add_one(taken)
        if task >= tasks:
            return
        pair, split = (task, 0) if phase == JOINED else (task // splits, task % splits)
        states = largest[pair], sums[pair], products[pair]
        b, h = pair // sizes[HEADS], pair % sizes[HEADS]
        if phase == JOINED:
            finish_sample(pair, sizes, states, about[pair], plain[pair], rests[pair], output, bounds_out)
            continue
        for row in range(rows):
            masks[row] = address(places[MASK], b, h * rows + row)
        means = array_at(address(places[UPPER], b, h), (kept_count,), np.float64)
        plain_queries(pair, places, sizes, np.float32(factors[SIGN]), means, full, narrow, hashed)
        if phase == HASHED:
            start, stop = sides * split // splits, sides * (split + 1) // splits
            for row in range(rows):
                normals = places[NORMALS, 0] + start * BYTES
                hash_query(
                    hashed[0][row], normals, sides * BYTES, stop - start, hash_workspace, words[pair, row, start:]
                )
                for j in range(sides, sizes[SIDES]):  # of no plane: as in the codes
                    words[pair, row, j] = NONE
            if split == 0:
                mine = states, about[pair], plain[pair], rests[pair]
                read_dense(pair, places, sizes, factors, masks, full, narrow, hashed, (logits, scaled), *mine)
        else:
            blocks = (sizes[OLD] + TOKENS - 1) // TOKENS
            state = largest[pair, split], sums[pair, split], products[pair, split], plain[pair, split]
            drawn[pair, split] = draw(
                (b, h),
                blocks * split // splits,
                blocks * (split + 1) // splits,
                places,
                sizes,
                factors[SCALE] * BITS,
                masks,
                words[pair],
                cosines[b],
                array_at(address(places[LOWER], b, h), (sizes[OLD],), np.float64),
                means,
                hashed,
                rests[pair, split],
                (reading, comparing),
                state,
            )


@c_function("void(intp)")
def attend_sample_at(data):
    """Call `attend_sample`, for threads: with the addresses of the arrays, and their sizes."""
    table = array_at(data, (20,), np.int64)
    batch, query_heads, width, heads, padded_rows, splits, wide = (
        table[7],
        table[8],
        table[9],
        table[10],
        table[11],
        table[12],
        table[13],
    )
    pairs, rows, sizes = batch * heads, query_heads // heads, array_at(table[2], (14,), np.int64)
    places, sides, bits = array_at(table[1], (PLACES, 5), np.int64), sizes[SIDES], table[14]
    count = pairs * (splits + 1) * rows
    work = (
        array_at(table[15], (pairs, rows, sides), np.int32),
        array_at(table[16], (pairs, ABOUT, rows), np.float64),
        array_at(table[17], (pairs, splits, rows), np.float64),
        array_at(table[18], (pairs, splits), np.int64),
        array_at(table[19], (pairs, splits + 1, rows), np.float32),
        array_at(table[19] + count * BYTES, (pairs, splits + 1, rows), np.float32),
        array_at(table[19] + 2 * count * BYTES, (pairs, splits + 1, rows), np.float32),
        array_at(table[19] + 3 * count * BYTES, (pairs, splits + 1, padded_rows, wide), np.float32),
    )
    attend_sample(
        table[6],
        array_at(table[0], (1,), np.int64),
        places,
        sizes,
        array_at(table[3], (2,), np.float64),
        array_at(places[LEVELS, 0], (batch, bits + 1), np.float64),
        array_at(table[4], (batch, query_heads, width), np.float32),
        array_at(table[5], (batch, query_heads), np.float64),
        work,
    )
