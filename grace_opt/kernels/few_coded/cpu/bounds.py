"""How large the attention can be that was not read, and what the rounding of its numbers can be."""

from __future__ import annotations

import math

import numpy as np

from ..._shared.jit import part
from ..._shared.lanes import greater, load, load_some, multiply_add, spread, store, total
from ..._shared.memory import start_of, zeros
from ...coded.cpu import (
    GROUP,
    HEADS,
    IN_TAIL,
    KEY_BASIS,
    NEWS,
    OF_SEQUENCE,
    SEQUENCES,
    SINK_KEYS,
    SINKS,
    TAIL_KEYS,
    WIDTH,
    head_of,
)
from ...decode.cpu import LOG2E, NOTHING, ZERO
from ...decode.cpu.rows import BYTES, WHOLE
from ...decode.forms import LANES
from ...reading.cpu.bounds import bound_of, raise_reach, terms_of
from ...reading.cpu.states import joined
from ..forms import AROUND, DONE, FIRST_ITEM, LAST_ITEM, REST, STEP, TERMS, TOKENS, UNITS


@part
def absolute_products(queries, rows, at, width, channel, found):
    """Write what the terms of each row's product with a row of the basis add up to."""
    row_at = at + channel * width * BYTES
    for row in range(rows):
        query, sums = start_of(queries[row]), spread(ZERO)
        for c in range(0, width, LANES):
            x, y = load(query + c * BYTES), load_some(row_at + c * BYTES, min(LANES, width - c))
            sums = multiply_add(greater(x, spread(ZERO) - x), greater(y, spread(ZERO) - y), sums)
        found[row] = np.float64(total(sums))


@part
def raise_all(reach, other):
    """Raise numbers to those of another row, of whole vectors."""
    at, more = start_of(reach), start_of(other)
    for c in range(0, reach.shape[0] * BYTES, WHOLE):
        store(at + c, greater(load(at + c), load(more + c)))


@part
def coded_terms(full, turned, rows, width, basis, reach, terms):
    """Write what the terms of products with coordinates add up to at most, and of those that turned the query."""
    found = zeros((rows,), np.float64)
    for row in range(rows):
        terms[row] = 0.0
    for c in range(width):
        if basis:
            absolute_products(full, rows, basis, width, c, found)
        for row in range(rows):
            terms[row] += (found[row] + abs(np.float64(turned[row, c]))) * np.float64(reach[c])


@part
def describe(pair, arrays, reach, own, about, dense):
    """Write what the terms of products add up to, and logarithms of the sums over what is always read."""
    sizes, _, _, scales, queries, _, ends, _ = arrays
    rows, width, heads = sizes[GROUP], sizes[WIDTH], sizes[HEADS]
    b, h = pair // heads, pair % heads
    of = sizes[SEQUENCES + b * OF_SEQUENCE :]
    full, around = queries[0, pair], zeros((queries.shape[3],), np.float32)
    raise_reach(of[SINK_KEYS] + h * of[SINK_KEYS + 1], of[SINK_KEYS + 2], of[SINKS], width, around)
    raise_reach(*head_of(sizes, TAIL_KEYS, b, h), sizes[IN_TAIL], width, around)
    largest = zeros((reach.shape[1],), np.float32)
    for row in range(rows):
        dense[row] = -np.inf
    for item in range(own[FIRST_ITEM], own[LAST_ITEM]):
        raise_all(largest, reach[item])
        for row in range(rows):
            more = joined(ends[0, item, row], ends[1, item, row])
            if more > -np.inf:
                top = max(more, dense[row])
                dense[row] = top + math.log2(2.0 ** (more - top) + 2.0 ** (dense[row] - top))
    basis = of[KEY_BASIS] + h * of[KEY_BASIS + 1] if of[KEY_BASIS] else of[KEY_BASIS]
    coded_terms(full, queries[1, pair], rows, width, basis, largest, about[TERMS])
    for row in range(rows):
        about[AROUND, row] = terms_of(full[row], around, width)
        if scales[1] != 0:  # a cap is steepest at 0, where it changes nothing; its own rounding is of its height
            for n in (TERMS, AROUND):
                about[n, row] = about[n, row] * np.float64(scales[2]) / (2 * np.float64(LOG2E)) + np.float64(scales[2])


@part
def bound(pair, arrays, one, head, about, epsilon, bounds):
    """Bound what was not read; return how many units are to be read then, more if there are too few."""
    sizes, ends = arrays[0], arrays[6]
    b, h, rows, worst = pair // sizes[HEADS], pair % sizes[HEADS], sizes[GROUP], 0.0
    every = sizes[SEQUENCES + b * OF_SEQUENCE + SINKS] + one[TOKENS] + sizes[NEWS]
    for row in range(rows):
        top, divisor = NOTHING, np.float32(0.0)
        for item in range(head[FIRST_ITEM], head[LAST_ITEM]):
            top = max(top, ends[0, item, row])
        for item in range(head[FIRST_ITEM], head[LAST_ITEM]):
            if ends[1, item, row] != 0:
                divisor += np.float32(2.0) ** (ends[0, item, row] - top) * ends[1, item, row]
        terms = about[TERMS, row]
        rest = about[REST, row] if head[DONE] < one[UNITS] else -np.inf
        around = max(terms, about[AROUND, row])
        found = bound_of(rest, joined(top, divisor), around, terms, sizes[WIDTH], every)
        bounds[b, h * rows + row] = found
        worst = max(worst, found)
    if epsilon <= 0 or worst <= epsilon:
        return head[DONE]
    return min(head[DONE] + one[STEP], one[UNITS])
