"""Products of query rows with a mean that turns with the position, by pairs of channels: of 64 positions at once.

At the first of 64 positions, the products of a pair are a complex number; at the others, that times one of 64 that are
the same everywhere. So all products are those of a few rows with a small matrix.

Source: as for `grace_opt.hf.bases.rotary`, which defines the result.
"""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ...._shared.jit import c_function, inlined
from ...._shared.lanes import add_one, load, spread, store
from ...._shared.memory import array_at, empty, start_of, zeros
from ...decode.cpu.rows import BYTES, WHOLE, add_multiples
from ..forms import BLOCK, ROWS

#: Blocks of a task.
AT_ONCE = 16
NOTHING = np.float32(0.0)


@inlined
def add_up(rows, row_step, table, count, out, out_step):
    """Multiply four rows of `count` numbers with a table of as many lines of 64; two vectors at a time."""
    for place in range(0, BLOCK * BYTES, 2 * WHOLE):
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(NOTHING)
        for c in range(count):
            x, y = load(table + c * BLOCK * BYTES + place), load(table + c * BLOCK * BYTES + place + WHOLE)
            a0, a1, a2, a3 = add_multiples(rows + c * BYTES, row_step, x, a0, a1, a2, a3)
            b0, b1, b2, b3 = add_multiples(rows + c * BYTES, row_step, y, b0, b1, b2, b3)
        to = out + place
        store(to, a0)
        store(to + out_step, a1)
        store(to + 2 * out_step, a2)
        store(to + 3 * out_step, a3)
        to += WHOLE
        store(to, b0)
        store(to + out_step, b1)
        store(to + 2 * out_step, b2)
        store(to + 3 * out_step, b3)


@c_function("void(intp)")
def turn_at(data):
    """Process the tasks not taken yet: some blocks of one pair of a sequence and a KV head.

    The table has the number of tasks taken; pairs, query rows, channels of a query, pairs of channels P, blocks; and
    the addresses of queries ``(pairs, rows, width)``, means ``(pairs, 2, P)``, channels ``(2, P)`` int64, cosines and
    sines at the blocks' first positions ``(blocks, 2, P)`` and in a block ``(2 P, 64)``, and of the products
    ``(pairs, rows padded, 64 blocks)``.
    """
    table = array_at(data, (12,), np.int64)
    pairs, rows, width, count, blocks = table[1], table[2], table[3], table[4], table[5]
    padded = (rows + ROWS - 1) // ROWS * ROWS
    queries, means = (
        array_at(table[6], (pairs, rows, width), np.float32),
        array_at(table[7], (pairs, 2, count), np.float32),
    )
    channels, begins = array_at(table[8], (2, count), np.int64), array_at(table[9], (blocks, 2, count), np.float32)
    products = array_at(table[11], (pairs, padded, blocks * BLOCK), np.float32)
    begun, own = zeros((ROWS, 2 * count), np.float32), empty((padded, 2, count), np.float32)
    per_pair = (blocks + AT_ONCE - 1) // AT_ONCE
    task = add_one(table)
    while task < pairs * per_pair:
        pair, first = task // per_pair, task % per_pair * AT_ONCE
        for row in range(padded):
            query = queries[pair, min(row, rows - 1)]
            for j in range(count):
                x, y, a, b = query[channels[0, j]], query[channels[1, j]], means[pair, 0, j], means[pair, 1, j]
                own[row, 0, j], own[row, 1, j] = x * a + y * b, y * a - x * b
        for block in range(first, min(first + AT_ONCE, blocks)):
            for row in range(0, padded, ROWS):
                for other in range(min(ROWS, rows - row)):
                    real, minus = own[row + other, 0], own[row + other, 1]
                    for j in range(count):
                        cosine, sine = begins[block, 0, j], begins[block, 1, j]
                        begun[other, j] = real[j] * cosine + minus[j] * sine
                        begun[other, count + j] = minus[j] * cosine - real[j] * sine
                to = start_of(products[pair, row]) + block * BLOCK * BYTES
                add_up(start_of(begun), 2 * count * BYTES, table[10], 2 * count, to, blocks * BLOCK * BYTES)
        task = add_one(table)
