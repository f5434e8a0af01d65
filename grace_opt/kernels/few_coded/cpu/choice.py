"""Which tokens of a head are read: their pages, or they themselves, in the order of `reference.reading_order`."""

from __future__ import annotations

import math

import numpy as np

from ..._shared.jit import part
from ..._shared.memory import empty
from ...decode.cpu import NOTHING
from ...decode.forms import LANES
from ...reading.cpu.bounds import log_sum
from ...reading.cpu.choice import expected_enough, rank_units, take_units
from ...reading.forms import BUCKETS
from ..forms import DONE, FIRST, READ_TOKENS, SIZE, STOP, TOKENS, UNITS, WORD

#: No share of a page is smaller, relative to the largest token's: its logarithm is a number, and far below all others.
SMALLEST = 2.0**-120


@part
def first_token(one, unit):
    """The first token of a page; of the page behind the last, the number of tokens."""
    return min(max(one[FIRST] + (unit - 1) * one[SIZE], 0), one[TOKENS]) if unit > 0 else 0


@part
def rank(one, rows, places, scores, dense, top_p, least, ranks, numbers):
    """Write the ranks of a head's units, and how many have each; return how many are to be read.

    Parameters
    ----------
    one
        Fields of the sequence.
    rows : int
    places : (tokens,) int64
    scores : (rows, places) float32
    dense : (rows,) float64
        Logarithms of the sums over what is always read.
    top_p : float
        Negative for none.
    least : int
    """
    count, units = one[TOKENS], one[UNITS]
    room = (count + LANES - 1) // LANES * LANES
    expected, shares = empty((rows, room), np.float32), empty((rows, room), np.float32)
    sums, tops, best = empty((rows,), np.float64), empty((rows,), np.float32), empty((room,), np.float32)
    for row in range(rows):
        for t in range(count):
            expected[row, t] = scores[row, places[t]]
        sums[row], tops[row] = log_sum(expected[row], count, shares[row])
        if one[SIZE] > 1:
            for unit in range(units):
                share = 0.0
                for t in range(first_token(one, unit), first_token(one, unit + 1)):
                    share += np.float64(shares[row, t])
                expected[row, unit] = tops[row] + np.float32(math.log2(max(share, SMALLEST)))
            for unit in range(units, room):
                expected[row, unit] = NOTHING
    rank_units(rows, units, expected, sums, best, ranks, numbers)
    if top_p > 0:
        mass = empty((BUCKETS, rows), np.float64)
        least = expected_enough(rows, units, sums, tops, shares, dense, ranks, numbers, mass, top_p, least)
    return min(least, units)


@part
def take(one, head, places, ranks, numbers, upper, chosen, counts):
    """Choose the next units: write their tokens' bits into words of places, and take them out of what is left."""
    for n in range(chosen.shape[0]):
        chosen[n], counts[n] = 0, 0
    taken = empty((one[UNITS],), np.int64)
    found = take_units(head[STOP] - head[DONE], one[UNITS], ranks, numbers, taken)
    for i in range(found):
        for t in range(first_token(one, taken[i]), first_token(one, taken[i] + 1)):
            place = places[t]
            chosen[place // WORD] |= np.uint64(1) << np.uint64(place % WORD)
            counts[place // WORD] += 1
            head[READ_TOKENS] += 1
            for row in range(upper.shape[0]):
                upper[row, place] = NOTHING
    head[DONE] = head[STOP]
