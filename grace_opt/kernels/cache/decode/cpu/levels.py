"""Read levels of a few bits into vectors of eight, out of bytes or of int32 (`grace_opt.kernels.cache.decode.packed`).

Which of the two it is, is checked for each vector, so there is one loop for both: the processor predicts the branch,
and the arithmetic takes longer.
"""

from __future__ import annotations

from ...._shared.jit import inlined
from ...._shared.lanes import load_byte_levels, load_int_levels, load_some_byte_levels, load_some_int_levels


@inlined
def load_levels(address, element, shift, bits):
    """Eight levels; `element` is the size of what holds them, in bytes, `shift` the number of bits below them."""
    if element == 1:
        return load_byte_levels(address, shift, bits)
    return load_int_levels(address, shift, bits)


@inlined
def load_some_levels(address, element, count, shift, bits):
    """The first `count` of eight levels, and zeros; nothing behind them is read."""
    if element == 1:
        return load_some_byte_levels(address, count, shift, bits)
    return load_some_int_levels(address, count, shift, bits)
