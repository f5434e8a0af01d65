"""Constants shared by the host and both kernels: kinds of masks, layouts of keys, sizes of blocks of rows."""

from __future__ import annotations

from ..._shared.limits import LANES as LANES

#: Kinds of masks.
NO_MASK, CAUSAL, BOOL, ADDITIVE = range(4)
#: Layouts of keys: each token's channels adjacent, each channel's tokens adjacent, or in a few bits.
BY_TOKEN, BY_CHANNEL, PACKED = range(3)
#: On the CPU: number of query rows with sums in registers at the same time.
ROWS = 4
