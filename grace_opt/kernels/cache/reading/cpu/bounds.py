"""The bound on the attention that was not read: sums of powers, joined in float64 with what rounding may have done.

`grace_opt.kernels.cache.reading.certificate` is the definition.
"""

from __future__ import annotations

import math

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import exp2, greater, greatest, load, load_some, multiply_add, spread, store, total
from ...._shared.memory import start_of
from ...decode.cpu import NOTHING, ZERO
from ...decode.cpu.rows import BYTES, WHOLE
from ...decode.forms import LANES
from ..forms import BESIDES, MARGIN

INFINITE = np.float32(np.inf)
PRECISION, BITS = 2.0**-23, math.log2(math.e)


@inlined
def raise_reach(address, step, count, width, reach):
    """Raise the entries of `reach` to the largest absolute number of each channel."""
    to = start_of(reach)
    for c in range(0, width, LANES):
        best, left = load(to + c * BYTES), min(LANES, width - c)
        for t in range(count):
            x = load_some(address + t * step + c * BYTES, left)
            best = greater(best, greater(x, spread(ZERO) - x))
        store(to + c * BYTES, best)


@inlined
def terms_of(query, reach, width):
    """Return what the terms of a product add up to at most."""
    terms = 0.0
    for c in range(width):
        terms += abs(np.float64(query[c])) * np.float64(reach[c])
    return terms


@inlined
def log_sum(row, count, shares):
    """Logarithm, in powers of two, of a row's sum of powers, whose shares of the largest are written.

    The row has space for whole vectors. A row with something that is not a number has no number for its sum.
    """
    stop = (count + LANES - 1) // LANES * LANES
    for u in range(count, stop):
        row[u] = NOTHING
    source, to, best = start_of(row), start_of(shares), spread(NOTHING)
    for place in range(0, stop * BYTES, WHOLE):
        best = greater(best, load(source + place))
    top = greatest(best)
    if top == NOTHING:
        for u in range(count):
            if row[u] != row[u]:
                return np.nan, INFINITE
        return np.float64(top), top
    shift, sums = spread(top), spread(ZERO)
    for place in range(0, stop * BYTES, WHOLE):
        share = exp2(load(source + place) - shift)
        store(to + place, share)
        sums = sums + share
    return np.float64(top) + math.log2(np.float64(total(sums))), top


@inlined
def log_bounds(row, pages, norms, length, shares):
    """Logarithm of the sum of what is expected of pages, or more: for tokens, with their norms times a length."""
    if length >= 0:
        source, to, factor = start_of(row), start_of(shares), spread(length)
        for u in range(0, pages, LANES):
            norm = load_some(norms + u * BYTES, min(LANES, pages - u))
            store(to + u * BYTES, multiply_add(factor, norm, load(source + u * BYTES)))
        rest, _ = log_sum(shares, pages, shares)
    else:
        rest, _ = log_sum(row, pages, shares)
    return rest


@inlined
def bound_of(rest, read, read_terms, rest_terms, width, count):
    """Return what `certificate.unread_bound` says, from numbers in powers of two."""
    if rest == -np.inf:
        return 0.0
    slack = (width + BESIDES) * PRECISION * (read_terms + rest_terms) / BITS + count * PRECISION * 4 + 2 * MARGIN
    exponent = (read - rest) / BITS - slack
    if not (read > -1e30 * BITS and exponent == exponent):
        return 1.0
    return min((1 + 1e-12) / (1.0 + math.exp(min(exponent, 700.0))), 1.0)
