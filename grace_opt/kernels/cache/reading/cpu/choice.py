"""The order in which pages are read, and how many of them: they are counted by score, for the whole group of heads.

Counting says up to which score pages are read, so nothing is sorted.
"""

from __future__ import annotations

import math

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import greater, greatest, load, spread, store
from ...._shared.memory import empty, start_of
from ...decode.cpu import NOTHING
from ...decode.cpu.rows import BYTES
from ...decode.forms import LANES
from ..forms import BUCKETS, HIDDEN, STEPS

STEP = np.float32(STEPS / math.log2(math.e))


@inlined
def rank_pages(rows, pages, expected, sums, score, ranks, numbers):
    """Write how many steps each page is below the first, and how many pages there are at each step.

    Pages are read in this order, and at one step in the order of the tokens: it is `reference.reading_order`.
    """
    to, highest = start_of(score), spread(NOTHING)
    for u in range(0, pages, LANES):
        best = spread(NOTHING)
        for row in range(rows):
            x = load(start_of(expected[row]) + u * BYTES)
            best = greater(best, x - spread(np.float32(sums[row])) if rows > 1 else x)
        store(to + u * BYTES, best)
        highest = greater(highest, best)
    top = greatest(highest)
    for n in range(BUCKETS):
        numbers[n] = 0
    for u in range(pages):
        below = (top - score[u]) * STEP
        rank = 0 if below != below else (np.int64(below) if below < HIDDEN - 1 else HIDDEN - 1)
        if score[u] == NOTHING:
            rank = HIDDEN
        ranks[u] = rank
        numbers[rank] += 1


@inlined
def expected_enough(rows, pages, sums, tops, shares, dense, ranks, numbers, mass, top_p, least):
    """Return how many pages have the needed share of the attention expected, with the dense tokens, for every row.

    `mass` is a workspace for the shares at each step; `sums` and `dense` are relative to what `tops` are.
    """
    needed = empty((rows,), np.float64)
    for row in range(rows):
        needed[row] = -np.inf
        if -np.inf < sums[row] < np.inf:
            pages_sum, top = 2.0 ** (sums[row] - np.float64(tops[row])), np.float64(tops[row])
            needed[row] = pages_sum - (1.0 - top_p) * (pages_sum + 2.0 ** (dense[row] - top))
    for n in range(BUCKETS):
        for row in range(rows):
            mass[n, row] = 0.0
    for u in range(pages):
        for row in range(rows):
            mass[ranks[u], row] += np.float64(shares[row, u])
    count = 0
    for n in range(BUCKETS):
        lacking, beyond = False, False
        for row in range(rows):
            lacking |= needed[row] > 0
            beyond |= needed[row] > max(mass[n, row], 0.0)
        if not lacking:
            break
        if beyond:  # all at this step are needed, and more
            for row in range(rows):
                needed[row] -= mass[n, row]
            count += numbers[n]
            continue
        for u in range(pages):
            if ranks[u] == n:
                lacking = False
                for row in range(rows):
                    lacking |= needed[row] > 0
                if not lacking:
                    break
                for row in range(rows):
                    needed[row] -= np.float64(shares[row, u])
                count += 1
        break
    return max(count, least)


@inlined
def take_pages(count, pages, ranks, numbers, taken):
    """Write the next `count` pages in the order of reading, in that of the tokens; they are not taken again."""
    border, left = 0, count
    while border < BUCKETS and left >= numbers[border]:
        left -= numbers[border]
        numbers[border] = 0
        border += 1
    if border < BUCKETS:
        numbers[border] -= left
    position = 0
    for u in range(pages):
        rank = ranks[u]
        if rank < border or (rank == border and left > 0):
            left -= rank == border
            taken[position] = u
            ranks[u] = BUCKETS
            position += 1
    return position
