"""Scores of pages: the largest logits of pages, or what tokens' first channels, in eight bits, add to theirs.

Scores lack what all logits of a row have in common.
"""

from __future__ import annotations

import math

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import greater, greatest, load_byte, load_byte_levels, load_one, load_short, load_some, spread
from ...._shared.memory import start_of
from ...decode.cpu import LOG2E, NOTHING, ZERO, address
from ...decode.cpu.logits import logits_by_token
from ...decode.cpu.rows import BYTES, WHOLE, add_multiples, store_four
from ...decode.forms import LANES, ROWS
from ..forms import (
    CODES,
    COUNTS,
    FIRST,
    GROUP,
    KEPT_COUNT,
    LEAD,
    LENGTH,
    LEVELS,
    LOWER,
    MASK,
    MEAN,
    OFF,
    OLD,
    PAGES,
    SCALE,
    SINKS,
    SIZE,
    SPLITS,
    TERMS,
    UPPER,
)
from .dense import queries_of


@inlined
def score_pages(queries, rows, places, sizes, b, h, start, stop, expected, other, half):
    """Fill the bounds of pages `start` to `stop`, which are the scores too; `other` and `half` are workspace."""
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
            four, to = start_of(half) + first * step, start_of(out) + first * out_step + start * BYTES
            logits_by_token(four, step, ranges, place[3], width, count, to, out_step)
    counts = places[COUNTS, 0] + b * places[COUNTS, 1]
    for u in range(start, stop):
        number = load_short(counts + u * places[COUNTS, 3])
        more = np.float32(math.log2(number)) if number > 0 else NOTHING
        for row in range(rows):
            expected[row, u] = (expected[row, u] + other[row, u]) + more


@inlined
def score_tokens(queries, rows, places, sizes, b, h, start, stop, expected, scaled):
    """Fill what steps times codes add to the logits of tokens `start` to `stop`, multiples of `PADDED_TO` but for the
    last; minus infinity for padding. `scaled` is a workspace."""
    lead, levels, place = sizes[LEAD], address(places[LEVELS], b, h), places[CODES]
    for row in range(rows):
        for c in range(lead):
            scaled[row, c] = queries[row, c] * load_one(levels + c * BYTES)
    step, out_step = scaled.shape[1] * BYTES, expected.shape[1] * BYTES
    for first in range(0, rows, ROWS):
        four, to = start_of(scaled) + first * step, start_of(expected) + first * out_step
        for t in range(start, stop, 2 * LANES):
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(ZERO)
            codes_address = address(place, b, h) + t
            for c in range(lead):
                x, y = load_byte_levels(codes_address, 0, 8), load_byte_levels(codes_address + LANES, 0, 8)
                a0, a1, a2, a3 = add_multiples(four + c * BYTES, step, x, a0, a1, a2, a3)
                b0, b1, b2, b3 = add_multiples(four + c * BYTES, step, y, b0, b1, b2, b3)
                codes_address += place[3]
            store_four(to + t * BYTES, out_step, a0, a1, a2, a3)
            store_four(to + t * BYTES + WHOLE, out_step, b0, b1, b2, b3)
    counts, u = places[COUNTS, 0] + b * places[COUNTS, 1], start
    while u < stop and load_short(counts + u * places[COUNTS, 3]) == 0:  # padding comes first
        for row in range(rows):
            expected[row, u] = NOTHING
        u += 1


@inlined
def describe_others(queries, rows, places, sizes, b, h, about):
    """Write what all logits of a row have besides the scores, what codes are off, and the query's norm in the channels
    without scores; add to the terms what those of the bounds have besides."""
    width, lead, pages = sizes[KEPT_COUNT], sizes[LEAD], sizes[PAGES]
    norms, mean, levels = address(places[LOWER], b, h), address(places[UPPER], b, h), address(places[LEVELS], b, h)
    low = levels + places[LEVELS, 3]
    off = low + places[LEVELS, 3]
    largest = spread(ZERO)
    for u in range(0, pages, LANES):
        largest = greater(largest, load_some(norms + u * BYTES, min(LANES, pages - u)))
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


@inlined
def hide_pages(rows, places, sizes, masks, expected):
    """Write minus infinity for pages of which the mask shows no token."""
    stop = 0
    for u in range(sizes[PAGES]):
        start, stop = stop, min(sizes[FIRST] + u * sizes[SIZE], sizes[OLD])
        for row in range(rows):
            seen = 0
            for t in range(start, stop):
                seen += load_byte(masks[row] + (sizes[SINKS] + t) * places[MASK, 4]) != 0
            if seen == 0:
                expected[row, u] = NOTHING


@inlined
def score(pair, split, places, sizes, factors, full, narrow, half, expected):
    """Score the pages of a split."""
    rows, pages = sizes[GROUP], sizes[PAGES]
    size = (pages // sizes[SPLITS] // (2 * LANES) + 1) * 2 * LANES  # an odd number writes one more
    start, stop = min(split * size, pages), min((split + 1) * size, pages)
    if start < stop:
        b, h = queries_of(pair, places, sizes, np.float32(factors[SCALE]) * LOG2E, full, narrow)
        if sizes[LEAD]:
            score_tokens(narrow, rows, places, sizes, b, h, start, stop, expected, half)
        else:
            other = np.empty_like(expected)
            score_pages(narrow, rows, places, sizes, b, h, start, stop, expected, other, half)
