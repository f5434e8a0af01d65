r"""The best exchange of one or two units for one or two others that keeps all rows; compiled.

Leaving or entering changes f by a cost of the unit's own and by the edges among those that move:

.. math:: \Delta = \sum_{u \text{ moves}} a_u + 2 \sum_{\text{both out}} W + 2 \sum_{\text{both in}} W
          - 2 \sum_{\text{one out, one in}} W
"""

from __future__ import annotations

from numba import b1, f8, i8

from ...._shared.jit import SMALL, inlined, jit
from .rows import BITS, DIGIT


@inlined
def moved(entries, i, p, q, u, v):
    """The change of sum i if p and q leave and u and v enter; q and v may be -1, for nobody."""
    change = entries[u, i] - entries[p, i]
    if q >= 0:
        change -= entries[q, i]
    if v >= 0:
        change += entries[v, i]
    return change


@inlined
def keeps_after(p, q, u, v, entries, sums, lower, upper, limbs, spent, limit):
    """Whether all rows hold after the exchange."""
    for r in range(len(sums)):
        now = sums[r] + moved(entries, r, p, q, u, v)
        if now < lower[r] or now > upper[r]:
            return False
    carry, rest = 0, 0
    for place in range(len(spent)):
        now = spent[place] + moved(limbs, place, p, q, u, v) - limit[place] + carry
        rest |= now & DIGIT
        carry = now >> BITS
    return carry < 0 or (carry == 0 and rest == 0)


@jit(
    ahead=[
        f8(
            f8[:, ::1], f8[:, ::1], f8, f8[::1], f8[::1], i8[::1], i8[::1], b1, i8[::1],
            i8[:, ::1], i8[::1], i8[::1], i8[::1], i8[:, ::1], i8[::1], i8[::1],
        )
    ],
    small=SMALL,
)  # fmt: skip
def best_exchange(
    W, sizes, tolerance, own, margin, outs, ins, double, best, entries, sums, lower, upper, limbs, spent, limit
):
    """Find the exchange that lowers f most, by more than rounding, and keeps all rows.

    Parameters
    ----------
    W, sizes : (m, m) float64
        Weights of units, and the sums of the absolute values that they were made of.
    tolerance : float64
        Rounding of a sum, relative to its size.
    own : (m,) float64
        What f changes by if a unit leaves, or enters, alone.
    margin : (m,) float64
        Rounding of a change, for each unit that moves.
    outs, ins : (a,), (b,) int64
        Units that may leave, and enter.
    double : bool
        Whether to try exchanges of more than two units, up to two for two; else one for one.
    best : (4,) int64
        Filled with the units that leave, the second perhaps -1, and those that enter.
    entries, sums, lower, upper, limbs, spent, limit
        The rows as in `rows`; sums and spent are those of the choice.

    Returns
    -------
    change : float64
        Of f, rounding added; 0 if there is none, and `best` is -1.
    """
    least = 0.0
    for i in range(4):
        best[i] = -1
    for a in range(len(outs)):
        p = outs[a]
        for a2 in range(a, len(outs) if double else a + 1):
            q = outs[a2] if a2 > a else -1
            leave = own[p] + margin[p]
            if q >= 0:
                leave += own[q] + margin[q] + 2.0 * W[p, q]
            for b in range(len(ins)):
                u = ins[b]
                single = leave + own[u] + margin[u] - 2.0 * W[p, u]
                if q >= 0:
                    single -= 2.0 * W[q, u]
                for b2 in range(b, len(ins) if double else b + 1):
                    v, change = -1, single
                    if b2 > b:
                        v = ins[b2]
                        change += own[v] + margin[v] + 2.0 * (W[u, v] + tolerance * sizes[u, v] - W[p, v])
                        if q >= 0:
                            change -= 2.0 * W[q, v]
                    if change < least and keeps_after(p, q, u, v, entries, sums, lower, upper, limbs, spent, limit):
                        least = change
                        best[0], best[1], best[2], best[3] = p, q, u, v
    return least
