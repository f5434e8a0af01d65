"""Limits that dispatch code and Triton kernels share, readable without importing triton."""

from __future__ import annotations

#: Largest n, or head dimension, that fits in one program on the GPU.
LARGEST_ON_CHIP = 256
