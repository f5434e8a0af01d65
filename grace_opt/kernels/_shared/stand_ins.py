"""The functions of `vectors` as plain loops: the same results, bit for bit, several times slower when compiled.

When: with ``GRACE_OPT_LLVM=0``, or with a version of llvmlite that does not accept the hand-written instructions; and
where loops run as plain Python (`interpreted`).
"""

from __future__ import annotations

import numpy as np

SIDE = 8


def prefetch(array, place):
    """Do nothing: the processor prefetches on its own."""


def add_twice(scores, row):
    """Add ``2 * row`` to the scores, exactly rounded; return the least score."""
    two, low = scores.dtype.type(2), scores.dtype.type(np.inf)
    for i in range(len(scores)):
        value = scores[i] + two * row[i]  # doubled in the scores' precision, where it is exact
        scores[i] = value
        if value < low:
            low = value
    return low


def least(scores):
    """Return the smallest score."""
    low = scores.dtype.type(np.inf)
    for value in scores:
        if value < low:
            low = value
    return low


def least_exchange(row, enter, leave):
    """Return the least of ``(leave + enter) - 2 * row``, in the precision of `enter` and in exactly this order."""
    two, low = enter.dtype.type(2), enter.dtype.type(np.inf)
    for j in range(len(row)):
        value = (leave + enter[j]) - two * row[j]
        if value < low:
            low = value
    return low


def first_place(scores, value):
    """Return the lowest index of `value`; the last index if there is none (`value` is NaN)."""
    for i in range(len(scores)):
        if scores[i] == value:
            return i
    return len(scores) - 1


def largest_bits(row):
    """Return max |w|, infinite if a number is not finite: ordered like the bits that `vectors` compares."""
    most = row.dtype.type(0)
    for value in row:
        size = abs(value)
        if not size <= most:
            most = size if size == size else row.dtype.type(np.inf)
    return most


def differ(W, row, column):
    """Return whether the square of side ``SIDE`` at (row, column) of W differs from its mirror image."""
    for i in range(SIDE):
        for j in range(SIDE):
            if W[row + i, column + j] != W[column + j, row + i]:
                return True
    return False
