"""How masks and keys are told apart, and in what pieces rows are taken: what the host and both kernels agree on."""

from __future__ import annotations

#: Kinds of masks.
NO_MASK, CAUSAL, BOOL, ADDITIVE = range(4)
#: How keys lie: each token's channels side by side, each channel's tokens, or in a few bits.
BY_TOKEN, BY_CHANNEL, PACKED = range(3)
#: On the CPU, query rows whose sums stay in registers together; and float32 numbers in a vector.
ROWS, LANES = 4, 8
