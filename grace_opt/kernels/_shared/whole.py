"""Operations on whole arrays as plain loops: numba takes up to a second to compile one of its own.

When: compiled loops that copy, sum, compare or sort arrays. The results are those of numba's own, bit for bit.
"""

from __future__ import annotations

import numpy as np

from .jit import inlined

#: Shorter parts are sorted by insertion, as in numba.
SHORT = 16


@inlined
def copy(target, source):
    """Do ``target[:] = source``, for arrays of one dimension and the same length."""
    for i in range(len(target)):
        target[i] = source[i]


@inlined
def equal(a, b):
    """Return whether two arrays of one dimension and the same length have the same entries."""
    same = True
    for i in range(len(a)):
        same &= a[i] == b[i]
    return same


@inlined
def total(values):
    """The sum, in order."""
    result = 0.0
    for value in values:
        result += value
    return result


@inlined
def largest(values):
    """The largest of some numbers; NaN if one is, minus infinity if there are none."""
    result = -np.inf
    for value in values:
        if not value <= result:
            result = value
            if value != value:
                break
    return result


@inlined
def sort(values):
    """Sort numbers in place, ascending: quicksort, which keeps the larger part for later, and insertion."""
    waiting, held = np.empty(128, np.int64), 2  # the parts at least halve: two numbers for each of 63
    waiting[0], waiting[1] = 0, len(values)
    while held > 0:
        held -= 2
        start, stop = waiting[held], waiting[held + 1]
        while stop - start > SHORT:
            a, b, c = values[start], values[(start + stop) // 2], values[stop - 1]
            pivot = max(min(a, b), min(max(a, b), c))
            i, j = start, stop - 1
            while i <= j:
                while values[i] < pivot:
                    i += 1
                while values[j] > pivot:
                    j -= 1
                if i <= j:
                    values[i], values[j] = values[j], values[i]
                    i += 1
                    j -= 1
            if j + 1 - start > stop - i:
                waiting[held], waiting[held + 1] = start, j + 1
                start = i
            else:
                waiting[held], waiting[held + 1] = i, stop
                stop = j + 1
            held += 2
        for i in range(start + 1, stop):
            value, j = values[i], i
            while j > start and values[j - 1] > value:
                values[j] = values[j - 1]
                j -= 1
            values[j] = value


@inlined
def sorted_places(values):
    """The places of numbers in ascending order; equal ones stay in order. By insertion, and then by merging."""
    n = len(values)
    places, merged = np.empty(n, np.int64), np.empty(n, np.int64)
    for start in range(0, n, SHORT):
        for i in range(start, min(start + SHORT, n)):
            j = i
            while j > start and values[places[j - 1]] > values[i]:
                places[j] = places[j - 1]
                j -= 1
            places[j] = i
    size = SHORT
    while size < n:
        for start in range(0, n, 2 * size):
            middle, stop = min(start + size, n), min(start + 2 * size, n)
            i, j = start, middle
            for k in range(start, stop):
                if j >= stop or (i < middle and not values[places[j]] < values[places[i]]):
                    merged[k] = places[i]
                    i += 1
                else:
                    merged[k] = places[j]
                    j += 1
        places, merged = merged, places
        size *= 2
    return places
