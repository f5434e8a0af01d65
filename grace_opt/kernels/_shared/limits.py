"""Limits that dispatch code and kernels share, readable without importing triton or numba."""

from __future__ import annotations

#: Largest n, or head dimension, that fits in one program on the GPU.
LARGEST_ON_CHIP = 256
#: float32 numbers in a vector of `grace_opt.kernels._shared.lanes`, on the CPU.
LANES = 8
#: Bits in a vector of `grace_opt.kernels._shared.bits`, and how many such are added up at once.
BITS, BITS_AT_ONCE = 256, 16
#: Where fewer vertices can be exchanged, `tabu` restarts from sets that may differ in all of them.
FEW_EXCHANGED = 16
#: Entries of W up to which a loop that is not compiled yet may run as plain Python.
SMALL = 14 * 14
