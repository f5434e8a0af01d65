"""The best set of a search, stored without copying all of x at every improvement; and checked by exact sums.

A search updates f with every move, with a rounding error each. `settle` sums the best set's f anew now and then, and
goes back to the last one that was summed if it is not better after all: what is returned is never worse than the start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import b1, f8, i4, i8, types, void

from ...._shared.jit import inlined, jit
from ...._shared.whole import copy
from .sums import GRAPH, objective

#: Rows of the values of a search: f of x, of the best set, of the best set of this run, of the best set summed exactly.
NOW, BEST, RUN, SURE = 0, 1, 2, 3


class BestSet(NamedTuple):
    """A set (n,) bool, the vertices that moved since (some of them twice), and their number (1,): if more, all."""

    x: Any
    moved: Any
    count: Any


#: numba's type of one.
BEST_SET = types.NamedTuple((b1[::1], i4[::1], i8[::1]), BestSet)


def new_best_set(x: Any) -> BestSet:
    """Return the best set of a search that begins with x, (n,) bool."""
    return BestSet(x.copy(), np.empty(len(x) // 4 + 16, np.int32), np.zeros(1, np.int64))


@inlined
def note_moved(best, v):
    """Note that a vertex has moved."""
    count = best.count[0]
    if count < len(best.moved):
        best.moved[count] = v
    best.count[0] = min(count, len(best.moved)) + 1


@inlined
def store_best(best, x):
    """Store x instead."""
    if best.count[0] > len(best.moved):
        copy(best.x, x)
    else:
        for i in range(best.count[0]):
            best.x[best.moved[i]] = x[best.moved[i]]
    best.count[0] = 0


@inlined
def note_all(best):
    """Note that any vertex may have moved."""
    best.count[0] = len(best.moved) + 1


@jit(ahead=[void(GRAPH, BEST_SET, b1[::1], f8[::1])])
def settle(g, best, sure, values):
    """Sum f of the best set; keep it as the sure one if it is better, else go back to the sure one."""
    if values[BEST] == values[SURE]:
        return
    values[BEST] = objective(g, best.x)[0]
    if values[BEST] < values[SURE]:
        copy(sure, best.x)
        values[SURE] = values[BEST]
    else:
        copy(best.x, sure)
        note_all(best)
        values[BEST] = values[SURE]
