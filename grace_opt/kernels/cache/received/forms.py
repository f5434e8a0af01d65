"""Sizes of blocks, shared by the host and the compiled loop."""

from __future__ import annotations

import math

#: Queries whose logits are held at once: a block of keys is read from memory once for all of them.
ROWS_AT_ONCE = 16
#: Largest number of shares of a head's queries, which threads take one by one; each has sums of its own.
MOST_TASKS = 16
#: Queries times this have logits in powers of two.
LOG2E = math.log2(math.e)
