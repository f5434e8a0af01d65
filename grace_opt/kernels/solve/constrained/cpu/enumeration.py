"""Visit every k-subset in revolving-door order, and compare those that keep all rows; compiled.

`exhaustive` runs it where there are constraints. f is summed in pairs for every subset that keeps the rows: O(k²) each,
and O(rows) for those that do not.
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i8, types

from ...._shared.jit import SMALL, jit
from ...enumeration.cpu import next_subset, pair_sum
from .rows import add, keeps


@jit(
    ahead=[
        types.Tuple((i8, b1))(
            f8[:, ::1], i8[::1], i8[::1], f8[::1], i8, i8[:, ::1], i8[::1], i8[::1], i8[:, ::1], i8[::1],
        )
    ],
    small=SMALL,
)  # fmt: skip
def advance(W, c, best, best_value, budget, entries, lower, upper, limbs, limit):
    """Visit up to `budget` subsets from `c` on; return how many, and whether these were the last.

    Parameters
    ----------
    W, c, best, best_value, budget
        As in `grace_opt.kernels.solve.enumeration.cpu.advance`.
    entries : (n, r) int64, lower, upper : (r,) int64
        The rows' entries, by vertex, and bounds of their sums.
    limbs : (n, p) int64, limit : (p,) int64
        As in `rows.keeps`.
    """
    k = c.shape[0] - 1
    sums, spent = np.zeros(len(lower), np.int64), np.zeros(len(limit), np.int64)
    for a in range(k):
        add(sums, entries[c[a]], 1)
        add(spent, limbs[c[a]], 1)
    for seen in range(budget):
        if keeps(sums, lower, upper, spent, limit):
            high, low = pair_sum(W, c[:k])
            if high < best_value[0] or (high == best_value[0] and low < best_value[1]):
                best_value[0], best_value[1] = high, low
                for a in range(k):
                    best[a] = c[a]
        out, new = next_subset(c)
        if new < 0:
            return seen + 1, True
        add(sums, entries[out], -1)
        add(sums, entries[new], 1)
        add(spent, limbs[out], -1)
        add(spent, limbs[new], 1)
    return budget, False
