"""Products of query rows with a mean that turns with the position, by pairs of channels: of 64 positions at once.

At the first of 64 positions, the products of a pair are a complex number; at the others, that times one of 64 that are
the same everywhere. So all products are those of a few rows with a small matrix.

Source: as for `grace_opt.hf.bases.rotary`, which defines the result.
"""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ...._shared.jit import c_function
from ...._shared.lanes import add_one
from ...._shared.memory import array_at, empty, start_of
from ...decode.cpu.logits import logits_by_channel
from ...decode.cpu.rows import BYTES
from ..forms import BLOCK, ROWS

#: Blocks of a task.
AT_ONCE = 16


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
    begun = empty((ROWS, 2 * count), np.float32)
    per_pair = (blocks + AT_ONCE - 1) // AT_ONCE
    task = add_one(table)
    while task < pairs * per_pair:
        pair, first = task // per_pair, task % per_pair * AT_ONCE
        for block in range(first, min(first + AT_ONCE, blocks)):
            for row in range(0, padded, ROWS):
                for other in range(ROWS):
                    query = queries[pair, min(row + other, rows - 1)]
                    for j in range(count):
                        x, y = query[channels[0, j]], query[channels[1, j]]
                        a, b = means[pair, 0, j], means[pair, 1, j]
                        real, imaginary = x * a + y * b, x * b - y * a
                        cosine, sine = begins[block, 0, j], begins[block, 1, j]
                        begun[other, j] = real * cosine - imaginary * sine
                        begun[other, count + j] = -(real * sine + imaginary * cosine)
                to = start_of(products[pair, row]) + block * BLOCK * BYTES
                four, step = start_of(begun), 2 * count * BYTES
                logits_by_channel(four, step, table[10], BLOCK * BYTES, 2 * count, BLOCK, to, blocks * BLOCK * BYTES)
        task = add_one(table)
