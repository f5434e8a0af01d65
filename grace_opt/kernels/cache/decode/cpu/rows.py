"""Operations on four rows of numbers in vectors of eight, shared by the parts of the decoding kernel.

The sums of four rows stay in registers, which LLVM's own vectoriser does not achieve. Addresses are plain integers, in
bytes.
"""

from __future__ import annotations

from ...._shared.jit import inlined
from ...._shared.lanes import load, load_one, multiply_add, spread, store, store_one, store_some, total
from ..forms import LANES

#: Bytes of a float32, of an int64, and of a vector.
BYTES, PLACE = 4, 8
WHOLE = LANES * BYTES


@inlined
def add_products(address, step, x, a, b, c, d):
    """Four rows of eight numbers each, from `address` on and `step` apart, times `x`, added to the four sums."""
    return (
        multiply_add(load(address), x, a),
        multiply_add(load(address + step), x, b),
        multiply_add(load(address + 2 * step), x, c),
        multiply_add(load(address + 3 * step), x, d),
    )


@inlined
def add_multiples(address, step, x, a, b, c, d):
    """Four single numbers, from `address` on and `step` apart, times `x`, added to the four sums."""
    return (
        multiply_add(spread(load_one(address)), x, a),
        multiply_add(spread(load_one(address + step)), x, b),
        multiply_add(spread(load_one(address + 2 * step)), x, c),
        multiply_add(spread(load_one(address + 3 * step)), x, d),
    )


@inlined
def load_four(address, step):
    """Eight numbers of each of four rows."""
    return load(address), load(address + step), load(address + 2 * step), load(address + 3 * step)


@inlined
def store_four(address, step, a, b, c, d):
    """Eight numbers of each of four rows."""
    store(address, a)
    store(address + step, b)
    store(address + 2 * step, c)
    store(address + 3 * step, d)


@inlined
def store_some_of_four(address, step, count, a, b, c, d):
    """The first `count` of eight numbers of each of four rows."""
    store_some(address, a, count)
    store_some(address + step, b, count)
    store_some(address + 2 * step, c, count)
    store_some(address + 3 * step, d, count)


@inlined
def store_pair(place, a, b):
    """The sums of two vectors, side by side."""
    store_one(place, total(a))
    store_one(place + BYTES, total(b))
