"""A few rows of a unit: queries times scales before its codes are read, products with its scales and means after."""

from __future__ import annotations

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import (
    WIDEST,
    exp2,
    greater,
    greatest,
    load,
    load_four,
    load_widest,
    multiply_add,
    spread,
    spread_four,
    spread_widest,
    store,
    total,
)
from ...._shared.memory import start_of, zeros
from ...decode.cpu import NOTHING, ZERO
from ...decode.cpu.rows import BYTES, WHOLE
from ..forms import LANES, ROWS

#: Bytes of the widest vector.
WIDE = WIDEST * BYTES


@inlined
def scale_queries(turned, width, order, scales, means, constants, scaled):
    """Multiply rows by the channels' scales, in the order of widths; write their products with the means."""
    whole = width // LANES * LANES
    for row in range(turned.shape[0]):
        every, address, to = spread(ZERO), start_of(turned[row]), start_of(means)
        for place in range(0, whole * BYTES, WHOLE):
            every = every + load(address + place) * load(to + place)
        constants[row] = total(every)
        for i in range(whole, width):
            constants[row] += turned[row, i] * means[i]
        for i in range(width):
            scaled[row, i] = turned[row, order[i]] * scales[i]


@inlined
def share_out(logits, count):
    """Replace the logits of one row, whole blocks, by its shares; return the maximum, and the sum of the shares."""
    start = start_of(logits)
    end, best, sums = start + count * BYTES, spread_widest(NOTHING), spread_widest(ZERO)
    for place in range(start, end, WIDE):
        best = greater(best, load_widest(place))
    largest = greatest(best)
    shift = spread_widest(largest)
    for place in range(start, end, WIDE):
        share = exp2(load_widest(place) - shift)
        store(place, share)
        sums = sums + share
    return largest, total(sums)


@inlined
def clear(totals, width):
    """Make the numbers of `ROWS` rows zeros."""
    for i in range(width):
        store(start_of(totals[i]), spread_four(ZERO))


@inlined
def add_products(shares, first, last, totals, width, order, scales, means, products):
    """Add to products (width, ROWS) what the rows' shares from place `first` to `last`, whole blocks, and the sums of
    their numbers make."""
    every = zeros((ROWS,), np.float32)
    for row in range(shares.shape[0]):
        address, sums = start_of(shares[row]), spread_widest(ZERO)
        for place in range(address + first * BYTES, address + last * BYTES, WIDE):
            sums = sums + load_widest(place)
        every[row] = total(sums)
    share = load_four(start_of(every))
    for i in range(width):
        address = start_of(products[order[i]])
        sums = multiply_add(load_four(start_of(totals[i])), spread_four(scales[i]), load_four(address))
        store(address, multiply_add(share, spread_four(means[order[i]]), sums))


@inlined
def add_rows(products, width, rows):
    """Add products (width, ROWS) to those of each row."""
    for row in range(rows.shape[0]):
        for c in range(width):
            rows[row, c] += products[c, row]
