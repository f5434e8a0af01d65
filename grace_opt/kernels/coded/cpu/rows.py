"""A few rows of a unit: queries times scales before its codes are read, products with its scales and means after."""

from __future__ import annotations

from ..._shared.jit import part
from ..._shared.lanes import load, spread, total
from ..._shared.memory import start_of
from ...decode.cpu import ZERO
from ...decode.cpu.rows import BYTES, WHOLE
from ..forms import LANES, ROWS


@part
def scale_queries(turned, width, order, scales, means, constants, scaled):
    """Multiply rows by the channels' scales, in the order of widths; write their products with the means."""
    whole = width // LANES * LANES
    for row in range(turned.shape[0]):
        every, at, to = spread(ZERO), start_of(turned[row]), start_of(means)
        for place in range(0, whole * BYTES, WHOLE):
            every = every + load(at + place) * load(to + place)
        constants[row] = total(every)
        for i in range(whole, width):
            constants[row] += turned[row, i] * means[i]
        for i in range(width):
            scaled[row, i] = turned[row, order[i]] * scales[i]


@part
def clear_totals(totals, width):
    """Make the sums of `ROWS` rows zeros."""
    for i in range(width):
        for row in range(ROWS):
            totals[i, row] = ZERO


@part
def add_products(shares, first, last, totals, width, order, scales, means, products):
    """Add to rows' products what shares from place `first` to `last` and the sums of their numbers make."""
    for row in range(products.shape[0]):
        every = spread(ZERO)
        at = start_of(shares[row])
        for t in range(at + first * BYTES, at + last * BYTES, WHOLE):
            every = every + load(t)
        share = total(every)
        for c in range(width):
            products[row, c] += share * means[c]
        for i in range(width):
            products[row, order[i]] += totals[i, row] * scales[i]
