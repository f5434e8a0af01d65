"""What the host passes to the compiled loop by address: the places of the entries of its records."""

from __future__ import annotations

#: Keys, or values: addresses, steps in bytes, and sizes.
TENSOR, HEAD_STEP, TOKEN_STEP, ORDER, ENCODE, WEIGHTS, ENERGY, BITS, HEADS, TOKENS, WIDTH = range(11)
LEVELS, MEANS, SCALES, HEAD_SCALE, PLANES, CAPACITY = range(11, 17)
#: Both: addresses and sizes of tables.
COUNTS, COSTS, WIDTHS, DISTORTIONS, RANGE, BOOKS, EDGES, TRELLIS = range(8)
CLASSES, CHOICES, ROWS_OF_BOOKS, ROWS_OF_TRELLIS, EVEN, LOWEST = range(8, 14)
#: Number of heads whose coordinates are held at once: a prompt must not take much more memory while it is coded.
AT_ONCE = 2
