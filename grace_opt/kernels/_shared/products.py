"""Products of four rows with a tile of columns, whose sums stay in registers: what compiled matrix products consist of.

Faster than torch's where the shared dimension is short and the result is used at once, in the processor's cache.
"""

from __future__ import annotations

import numpy as np

from .jit import inlined
from .lanes import WIDEST, load_one, load_widest, multiply_add, spread_widest, store, transpose_widest
from .memory import array_at, start_of

load, spread = load_widest, spread_widest
#: Bytes of a float32, of an address, and of a vector.
BYTES, ADDRESS = 4, 8
WHOLE = WIDEST * BYTES
#: Rows and columns whose products are in registers at the same time.
ROWS, TILE = 4, 3 * WIDEST
ZERO = np.float32(0.0)


@inlined
def multiply(rows, row_step, columns, width, out, out_step):
    """Products of four rows of `width` numbers with `TILE` columns, whose first numbers come first, then the second."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = spread(ZERO)
    for _ in range(width):
        x, y, z = load(columns), load(columns + WHOLE), load(columns + 2 * WHOLE)
        q = spread(load_one(rows))
        a0, b0, c0 = multiply_add(q, x, a0), multiply_add(q, y, b0), multiply_add(q, z, c0)
        q = spread(load_one(rows + row_step))
        a1, b1, c1 = multiply_add(q, x, a1), multiply_add(q, y, b1), multiply_add(q, z, c1)
        q = spread(load_one(rows + 2 * row_step))
        a2, b2, c2 = multiply_add(q, x, a2), multiply_add(q, y, b2), multiply_add(q, z, c2)
        q = spread(load_one(rows + 3 * row_step))
        a3, b3, c3 = multiply_add(q, x, a3), multiply_add(q, y, b3), multiply_add(q, z, c3)
        columns += TILE * BYTES
        rows += BYTES
    store(out, a0)
    store(out + WHOLE, b0)
    store(out + 2 * WHOLE, c0)
    out += out_step
    store(out, a1)
    store(out + WHOLE, b1)
    store(out + 2 * WHOLE, c1)
    out += out_step
    store(out, a2)
    store(out + WHOLE, b2)
    store(out + 2 * WHOLE, c2)
    out += out_step
    store(out, a3)
    store(out + WHOLE, b3)
    store(out + 2 * WHOLE, c3)


@inlined
def fill_tile(rows, width, address):
    """Write `TILE` rows of `width` numbers, whose addresses are given, as the columns that `multiply` takes."""
    squares, step, tile = width // WIDEST * WIDEST, TILE * BYTES, array_at(address, (width, TILE), np.float32)
    for c in range(0, squares, WIDEST):
        for i in range(0, TILE, WIDEST):
            transpose_widest(start_of(rows) + i * ADDRESS, c * BYTES, address + c * step + i * BYTES, step)
    for c in range(squares, width):
        for i in range(TILE):
            tile[c, i] = load_one(rows[i] + c * BYTES)
