"""The greedy loop of MIES and drop-greedy, several instances side by side.

Which row of W is read next is known only when the minimum is, and it comes from main memory: on its own, an instance
waits for it most of the time. So ``TOGETHER`` instances take turns: each finds its vertex and asks for the row, and by
the time that its turn comes again the row is in the cache. Minimum, place and update are three plain loops, because
each of them alone is turned into vector instructions.

Source: ours; Algorithm 1 of GRACE (arXiv 2604.16983).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

#: Instances that take turns: enough to cover the wait for memory, few enough for their scores to stay in the cache.
TOGETHER = 8
CACHE_LINE = 64


@intrinsic
def ask_for(typing_context, array, place):
    """Have the processor fetch the cache line of ``array[place]`` without waiting for it."""

    def generate(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # To read (0), to be kept in every cache (3), data and not instructions (1).
        builder.call(fetch, [address, *(ir.Constant(number, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


# Without these liberties (no NaN, zeros alike, any order) a minimum is found one number after the other.
@njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def least(scores):
    """The smallest score."""
    found = scores[0]
    for i in range(scores.shape[0]):
        found = min(found, scores[i])
    return found


@njit(cache=True, nogil=True)
def first_place(scores, value):
    """The lowest index at which `value` stands."""
    size = np.int32(scores.shape[0])
    found = size
    for i in range(size):
        place = np.int32(i) if scores[i] == value else size
        found = min(found, place)
    return found


@njit(cache=True, nogil=True)
def add_twice(scores, row):
    """``scores += 2 * row``, exactly rounded: doubling is exact."""
    for i in range(scores.shape[0]):
        scores[i] += row[i] + row[i]


@njit(cache=True, nogil=True)
def greedy(W, scores, k, order, rise):
    """Fill `order`, and `rise` with the sum of the scores of what was taken; `scores` is scratch."""
    size, n = scores.shape
    line = CACHE_LINE // W.itemsize
    taken = np.zeros(TOGETHER, np.int64)
    for start in range(0, size, TOGETHER):
        stop = min(start + TOGETHER, size)
        rise[start:stop] = 0.0
        for step in range(k[start:stop].max()):
            for b in range(start, stop):
                if step < k[b]:
                    value = least(scores[b])
                    best = first_place(scores[b], value)
                    order[b, step] = best
                    rise[b] += value
                    scores[b, best] = np.inf
                    taken[b - start] = best
                    for i in range(0, n, line):
                        ask_for(W[b, best], i)
            for b in range(start, stop):
                if step < k[b]:
                    add_twice(scores[b], W[b, taken[b - start]])
