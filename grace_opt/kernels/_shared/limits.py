"""Sizes that doors and Triton's kernels must agree on; doors do not import triton to ask."""

from __future__ import annotations

#: Largest n, or head dimension, for which one program on the GPU holds what it works on.
LARGEST_ON_CHIP = 256
