"""Constants shared by the host and the compiled loop: what a table says of each unit, and the order of widths."""

from __future__ import annotations

from ..._shared.limits import LANES as LANES

#: Bits that a number can have: what an index into a table of widths stands for.
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)
#: Fields of a unit, a class of tokens of one head: number of tokens, first place among the newest tokens (-1 if it has
#: none there), and what `KEYS` and `VALUES` have each.
COUNT, NEWEST, KEYS, VALUES = 0, 1, 2, 10
#: Addresses of the unit's first bit plane, of what comes after all planes, of its widths' bits; bytes per plane of
#: these, the first one's number; addresses of the first scale, the first mean, the power of two that both are
#: multiplied by.
PLANES, END, LEVELS, LEVEL_BYTES, LEVEL, SCALES, MEANS, HEAD_SCALE = range(8)
FIELDS = 18
#: Most query rows with sums in registers at the same time. Three are as many where that takes no more passes.
ROWS = 4
#: Tokens that loops take at once, of the widest vectors; elsewhere fewer.
BLOCK = 64
