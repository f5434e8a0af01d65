"""Add shares of four query rows times a block of values, dense or in a few bits, to the sums.

:mod:`grace_opt.kernels.cache.decode.cpu` calls it for each region. Values in a few bits
(`grace_opt.kernels.cache.decode.packed.PackedValues`) are read in place: a share is multiplied by the scale of its
token and group once, and the zero points are summed separately.
"""

from __future__ import annotations

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import load, load_one, load_place, load_short, load_some, prefetch, spread, store_one
from ..forms import LANES
from ..packed import ENTRIES, FIRST, LEVELS, PLANE, SCALE, STEP, ZERO
from .levels import load_levels, load_some_levels
from .rows import BYTES, PLACE, WHOLE, add_multiples, load_four, store_four, store_some_of_four

#: Tokens whose values are added before the sums go back to memory, and how many tokens ahead values are prefetched.
GROUP, AHEAD = 8, 16
NOTHING = np.float32(0.0)


@inlined
def add_values(shares, share_step, values, value_step, width, count, out, out_step):
    """Add to four rows of `out` their shares times `count` values, sixteen channels at a time."""
    for start in range(0, count, GROUP):
        stop = min(start + GROUP, count)
        for c in range(0, width, 2 * LANES):
            place = out + c * BYTES
            a0, a1, a2, a3 = load_four(place, out_step)
            b0, b1, b2, b3 = load_four(place + WHOLE, out_step)
            value, left = values + c * BYTES, width - c
            if left >= 2 * LANES:
                for t in range(start, stop):
                    address, share = value + t * value_step, shares + t * BYTES
                    prefetch(address + AHEAD * value_step)
                    a0, a1, a2, a3 = add_multiples(share, share_step, load(address), a0, a1, a2, a3)
                    b0, b1, b2, b3 = add_multiples(share, share_step, load(address + WHOLE), b0, b1, b2, b3)
            else:
                low, high = min(left, LANES), max(left - LANES, 0)
                for t in range(start, stop):
                    address, share = value + t * value_step, shares + t * BYTES
                    a0, a1, a2, a3 = add_multiples(share, share_step, load_some(address, low), a0, a1, a2, a3)
                    b0, b1, b2, b3 = add_multiples(share, share_step, load_some(address + WHOLE, high), b0, b1, b2, b3)
            store_four(place, out_step, a0, a1, a2, a3)
            store_four(place + WHOLE, out_step, b0, b1, b2, b3)


@inlined
def add_packed_values(shares, share_step, scaled, table, owners, head, form, start, width, count, out, out_step):
    """Add to four rows of `out` their shares times `count` values from token `start` on, group by group.

    `form` is that of `attend`, `scaled` a workspace for rows like those of the shares.
    """
    size, bits, element, lowest, higher, zero_in_levels = form
    per_token = width // size
    t, stop = start, start + count
    while t < stop:  # all tokens of one entry
        owner, until = load_short(owners + t * BYTES), t + 1
        while until < stop and load_short(owners + until * BYTES) == owner:
            until += 1
        entry = table + owner * ENTRIES * PLACE
        levels, plane = load_place(entry + LEVELS * PLACE), load_place(entry + PLANE * PLACE)
        scale, zero = load_place(entry + SCALE * PLACE), load_place(entry + ZERO * PLACE)
        first = load_place(entry + STEP * PLACE) * head + load_place(entry + FIRST * PLACE)
        for group in range(per_token):
            u = t
            while u < until:  # all tokens whose bits are in one plane
                row = first + u * per_token + group
                p = row // plane
                tokens = min(until - u, ((p + 1) * plane - row + per_token - 1) // per_token)
                mine, offset = shares + (u - start) * BYTES, row * BYTES
                zeros = scale_shares(
                    mine, share_step, scale + offset, zero + offset, per_token * BYTES, tokens, zero_in_levels, scaled
                )
                add_levels(
                    scaled,
                    share_step,
                    levels + (row - p * plane) * size * element,
                    per_token * size * element,
                    size,
                    tokens,
                    element,
                    lowest + p * higher,
                    bits,
                    zeros,
                    out + group * size * BYTES,
                    out_step,
                )
                u += tokens
        t = until


@inlined
def scale_shares(shares, share_step, scale, zero, step, count, zero_in_levels, scaled):
    """Shares of four rows times the scales of `count` tokens, into `scaled`; minus their products with the zeros."""
    a0 = a1 = a2 = a3 = NOTHING
    for i in range(count):
        s, z = load_one(scale + i * step), load_one(zero + i * step)
        if zero_in_levels:
            z = z * s
        share, place = shares + i * BYTES, scaled + i * BYTES
        q0, q1 = load_one(share), load_one(share + share_step)
        q2, q3 = load_one(share + 2 * share_step), load_one(share + 3 * share_step)
        store_one(place, q0 * s)
        store_one(place + share_step, q1 * s)
        store_one(place + 2 * share_step, q2 * s)
        store_one(place + 3 * share_step, q3 * s)
        a0, a1, a2, a3 = a0 - q0 * z, a1 - q1 * z, a2 - q2 * z, a3 - q3 * z
    return spread(a0), spread(a1), spread(a2), spread(a3)


@inlined
def add_levels(scaled, share_step, levels, step, size, count, element, shift, bits, zeros, out, out_step):
    """Add the levels of one group of channels, times the scaled shares of `count` tokens, and `zeros`."""
    z0, z1, z2, z3 = zeros
    for c in range(0, size, 2 * LANES):
        place, address, left = out + c * BYTES, levels + c * element, size - c
        low, high = min(left, LANES), max(min(left - LANES, LANES), 0)
        a0, a1, a2, a3 = load_four(place, out_step)
        b0, b1, b2, b3 = load_four(place + WHOLE, out_step)
        if left >= 2 * LANES:
            for i in range(count):
                share, here = scaled + i * BYTES, address + i * step
                x = load_levels(here, element, shift, bits)
                y = load_levels(here + LANES * element, element, shift, bits)
                a0, a1, a2, a3 = add_multiples(share, share_step, x, a0, a1, a2, a3)
                b0, b1, b2, b3 = add_multiples(share, share_step, y, b0, b1, b2, b3)
        else:
            for i in range(count):
                share, here = scaled + i * BYTES, address + i * step
                x = load_some_levels(here, element, low, shift, bits)
                y = load_some_levels(here + LANES * element, element, high, shift, bits)
                a0, a1, a2, a3 = add_multiples(share, share_step, x, a0, a1, a2, a3)
                b0, b1, b2, b3 = add_multiples(share, share_step, y, b0, b1, b2, b3)
        # Only these: the next channels belong to another group.
        store_some_of_four(place, out_step, low, a0 + z0, a1 + z1, a2 + z2, a3 + z3)
        store_some_of_four(place + WHOLE, out_step, high, b0 + z0, b1 + z1, b2 + z2, b3 + z3)
