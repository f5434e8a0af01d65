"""Codes of a trellis as they are read: one bit longer, so that the loops over bit planes need not know of a trellis.

Of each channel, the lowest plane becomes two, and the others are copied, into a workspace that stays in the processor's
caches.

When: units whose codes are those of a trellis, where octets are not made of planes, which do this on the way
(:mod:`grace_opt.kernels.cache.coded.cpu.octets`). Source: as for :mod:`grace_opt.kernels.cache.coding.trellis`.
"""

from __future__ import annotations

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import load_byte
from ...._shared.memory import array_at, start_of
from .channels import ALL, LAST, READ_BITS, safe_part
from .products import BLOCK, BLOCK_STEP


@inlined
def lengthen(own, before, low, high):
    """Write the two planes that a plane is read as; `before` is its byte before the first, or 0."""
    count, last = own.shape[0], np.uint8(before)
    for i in range(min(count, 1)):
        low[i] = own[i] << 1 | last >> 7
        high[i] = own[i] ^ (own[i] << 2 | last >> 6) ^ (own[i] << 3 | last >> 5)
    for i in range(1, count):
        here, last = own[i], own[i - 1]
        low[i] = np.uint8(here << 1) | np.uint8(last >> 7)
        high[i] = here ^ (np.uint8(here << 2) | np.uint8(last >> 6)) ^ (np.uint8(here << 3) | np.uint8(last >> 5))


@inlined
def read_longer(places, starts, offset, stride, count, workspace):
    """Write the planes of `count` tokens, from a byte of each plane on, as they are read; change the channels' places.

    Returns the bytes of a plane that is written.
    """
    size, step = (count + 7) // 8, (count + BLOCK - 1) // BLOCK * BLOCK_STEP
    to = start_of(workspace)
    for slot in range(1, ALL):
        for i in range(starts[slot], starts[slot + 1]):
            source, planes = places[i] + offset, READ_BITS[slot]
            places[i] = to
            if slot != LAST + 1:
                before = np.int64(load_byte(source - 1)) if offset > 0 else offset * 0
                own = array_at(source, (size,), np.uint8)
                lengthen(own, before, array_at(to, (size,), np.uint8), array_at(to + step, (size,), np.uint8))
                to, source, planes = to + 2 * step, source + stride, planes - 2
            for _ in range(planes):
                own, other = array_at(source, (size,), np.uint8), array_at(to, (size,), np.uint8)
                for byte in range(size):
                    other[byte] = own[byte]
                to, source = to + step, source + stride
    return step


@inlined
def read_from(places, starts, offset, stride, count, beyond, longer):
    """Return where `count` tokens are read in blocks: the byte of each plane, a plane's bytes, and how many tokens.

    `beyond` has the address behind the unit's last plane, and the one behind what may be read; `longer` is a workspace
    for planes of a trellis, None or of no bytes if there is none.
    """
    if longer is not None and longer.shape[0] > 0:
        step = read_longer(places, starts, offset, stride, count, longer)
        return offset * 0, step, (count + BLOCK - 1) // BLOCK * BLOCK
    return offset, stride, safe_part(count, offset, stride, beyond[0], beyond[1])
