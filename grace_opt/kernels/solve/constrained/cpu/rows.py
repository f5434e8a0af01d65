"""Whether a choice keeps linear rows, from the sums of its vertices' entries; in integers, and so exact.

A row's sum is an int64. Costs that int64 has no room for are numbers of several limbs of 32 bits, the lowest first:
their sums are compared with the limit by carrying (Knuth, TAOCP 2, 4.3.1).
"""

from __future__ import annotations

from ...._shared.jit import inlined

BITS = 32
DIGIT = (1 << BITS) - 1


@inlined
def keeps(sums, lower, upper, spent, limit):
    """Return whether the sums (r,) lie in their bounds, and the number `spent` (p,) is at most the `limit`."""
    for r in range(len(sums)):
        if sums[r] < lower[r] or sums[r] > upper[r]:
            return False
    carry, rest = 0, 0
    for p in range(len(spent)):
        now = spent[p] - limit[p] + carry
        rest |= now & DIGIT
        carry = now >> BITS
    return carry < 0 or (carry == 0 and rest == 0)


@inlined
def add(sums, entries, times):
    """Add `times` the entries of one vertex to the sums, in place."""
    for r in range(len(sums)):
        sums[r] += times * entries[r]
