"""What is done once for a pair: before its splits are read, the choice of pages; then, the result and the bound."""

from __future__ import annotations

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import load_one
from ...._shared.memory import empty, zeros
from ...decode.cpu import LOG2E, address
from ...decode.cpu.rows import BYTES
from ...decode.forms import BOOL
from ..forms import (
    AROUND,
    BUCKETS,
    DONE,
    EPSILON,
    GROUP,
    HEADS,
    KEPT_COUNT,
    KIND,
    LEAD,
    LENGTH,
    MEAN,
    NORMS,
    OFF,
    OLD,
    PAGES,
    REACH,
    SCALE,
    SINKS,
    TAIL,
    TERMS,
    TOP_P,
    VALUE_WIDTH,
    WIDTH,
)
from .bounds import bound_of, log_bounds, log_sum, terms_of
from .choice import expected_enough, rank_pages
from .dense import attend_dense, queries_of
from .scores import describe_others, hide_pages
from .states import join_splits, joined


@inlined
def prepare(
    pair, places, sizes, factors, least, full, narrow, masks, workspaces, state, about, expected, ranks, numbers_at
):
    """Attend to the dense tokens, and say in which order pages are read, and how many."""
    rows, width, kept_count, pages = sizes[GROUP], sizes[WIDTH], sizes[KEPT_COUNT], sizes[PAGES]
    largest, sums, _ = state
    b, h = queries_of(pair, places, sizes, np.float32(factors[SCALE]) * LOG2E, full, narrow)
    reach_around, reach = zeros((full.shape[1],), np.float32), zeros((narrow.shape[1],), np.float32)
    attend_dense(full, places, sizes, b, h, masks, workspaces, state, reach_around)
    for c in range(kept_count):
        reach[c] = load_one(address(places[REACH], b, h) + c * BYTES)
    for row in range(rows):
        about[TERMS, row], about[AROUND, row] = (
            terms_of(narrow[row], reach, kept_count),
            terms_of(full[row], reach_around, width),
        )
        about[MEAN, row], about[OFF, row], about[LENGTH, row] = 0.0, 0.0, -1.0
    if sizes[LEAD]:
        describe_others(narrow, rows, places, sizes, b, h, about)
    if sizes[KIND] == BOOL:
        hide_pages(rows, places, sizes, masks, expected)
    shares, workspace = empty((rows, expected.shape[1]), np.float32), empty((expected.shape[1],), np.float32)
    totals, tops, dense = empty((rows,), np.float64), empty((rows,), np.float32), empty((rows,), np.float64)
    for row in range(rows):
        totals[row], tops[row] = log_sum(expected[row], pages, shares[row])
        dense[row] = joined(largest[row], sums[row]) - about[MEAN, row]
    rank_pages(rows, pages, expected, totals, workspace, ranks, numbers_at)
    stop = min(least[0, b], pages)
    if factors[TOP_P] > 0:
        mass = empty((BUCKETS, rows), np.float64)
        enough = expected_enough(
            rows, pages, totals, tops, shares, dense, ranks, numbers_at, mass, factors[TOP_P], stop
        )
        stop = min(enough, pages)
    return stop


@inlined
def finish(pair, sizes, factors, least, states, about, expected, counts, output, bounds_out):
    """Join the splits, and bound what was not read; return how many pages are to be read then, more if too few were.

    `counts` are the numbers of pages read, and of real tokens by split.
    """
    rows, pages, value_width = sizes[GROUP], sizes[PAGES], sizes[VALUE_WIDTH]
    largest, sums, products = states
    every, worst, done = sizes[SINKS] + sizes[OLD] + sizes[TAIL], 0.0, counts[DONE]
    b, h, workspace = pair // sizes[HEADS], pair % sizes[HEADS], empty((expected.shape[1],), np.float32)
    for row in range(rows):
        top, divisor = join_splits(largest, sums, products, row, value_width, output[b, h * rows + row])
        rest, read = -np.inf, joined(top, divisor)
        if done < pages:
            rest = log_bounds(expected[row], pages, counts[NORMS], np.float32(about[LENGTH, row]), workspace)
            rest += about[MEAN, row] + about[OFF, row]
        terms = about[TERMS, row]
        bound = bound_of(rest, read, max(terms, about[AROUND, row]), terms, sizes[WIDTH], every)
        bounds_out[b, h * rows + row] = bound
        worst = max(worst, bound)
    if factors[EPSILON] <= 0 or worst <= factors[EPSILON]:
        return done
    return min(done + least[1, b], pages)
