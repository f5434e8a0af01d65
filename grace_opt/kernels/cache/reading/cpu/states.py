"""The running sums of a pair: of each split, and of the dense tokens, the largest logit, the sum and the products."""

from __future__ import annotations

import math

import numpy as np

from ...._shared.jit import inlined
from ...decode.cpu import NOTHING, ZERO


@inlined
def clear(largest, sums, products):
    """Make the states of a pair's splits those of nothing read."""
    for split in range(largest.shape[0]):
        for row in range(largest.shape[1]):
            largest[split, row], sums[split, row] = NOTHING, ZERO
        for row in range(products.shape[1]):
            for c in range(products.shape[2]):
                products[split, row, c] = ZERO


@inlined
def joined(largest, sums):
    """Logarithm of a running sum, in powers of two."""
    return np.float64(largest) + math.log2(np.float64(sums)) if sums > 0 else -np.inf


@inlined
def join_splits(largest, sums, products, row, value_width, out):
    """Write a row's sum of all splits, divided by its weights' sum; return the largest logit and that sum."""
    top, divisor = NOTHING, ZERO
    for split in range(largest.shape[0]):
        top = max(top, largest[split, row])
    for c in range(value_width):
        out[c] = ZERO
    for split in range(largest.shape[0]):
        if sums[split, row] == 0:
            continue
        weight = np.float32(2.0) ** (largest[split, row] - top)
        divisor += weight * sums[split, row]
        for c in range(value_width):
            out[c] += weight * products[split, row, c]
    for c in range(value_width):
        out[c] /= divisor
    return top, divisor


@inlined
def log_add(a, b):
    """Logarithm of the sum of two numbers whose logarithms these are, in powers of two; not a number if one is not."""
    if a == -np.inf:
        return b
    if b == -np.inf:
        return a
    return max(a, b) + math.log2(1.0 + 2.0 ** -abs(a - b))
