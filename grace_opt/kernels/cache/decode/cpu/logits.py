r"""Logits of four query rows with a block of keys: dense keys in two layouts, and keys in a few bits.

Keys in a few bits (`grace_opt.kernels.cache.decode.packed.PackedKeys`) are read in place. With levels :math:`l_{ct}`, a
scale :math:`s_c` and a zero point :math:`z_c` for each channel of a group of tokens,

.. math:: \sum_c q_c (s_c l_{ct} - z_c) = \sum_c (q_c s_c)\, l_{ct} - \sum_c q_c z_c,

so scales and zero points are processed once per group, and each token costs only its levels. If zero points count
levels, the last sum has :math:`q_c s_c` in place of :math:`q_c`.
"""

from __future__ import annotations

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import load, load_place, load_short, load_some, prefetch, spread, store, total
from ..forms import LANES
from ..packed import ENTRIES, FIRST, LEVELS, PLANE, SCALE, STEP, ZERO
from .levels import load_levels, load_some_levels
from .rows import BYTES, PLACE, WHOLE, add_multiples, add_products, load_four, store_four, store_pair

#: Number of bytes by which token-major keys are prefetched.
KEY_AHEAD = 2048
CACHE_LINE = 64
NOTHING = np.float32(0.0)


@inlined
def logits_by_token(queries, query_step, keys, key_step, width, count, out, out_step):
    """Logits of four rows with `count` keys whose channels are adjacent, two keys at a time."""
    full, rest = width - width % LANES, width % LANES
    for t in range(0, count, 2):
        key = keys + t * key_step
        other = key + key_step if t + 1 < count else key  # the last of an odd number is computed twice: `out` has space
        for place in range(0, 2 * width * BYTES, CACHE_LINE):
            prefetch(key + KEY_AHEAD + place)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(NOTHING)
        for c in range(0, full * BYTES, WHOLE):
            a0, a1, a2, a3 = add_products(queries + c, query_step, load(key + c), a0, a1, a2, a3)
            b0, b1, b2, b3 = add_products(queries + c, query_step, load(other + c), b0, b1, b2, b3)
        if rest:
            c = full * BYTES
            a0, a1, a2, a3 = add_products(queries + c, query_step, load_some(key + c, rest), a0, a1, a2, a3)
            b0, b1, b2, b3 = add_products(queries + c, query_step, load_some(other + c, rest), b0, b1, b2, b3)
        place = out + t * BYTES
        store_pair(place, a0, b0)
        store_pair(place + out_step, a1, b1)
        store_pair(place + 2 * out_step, a2, b2)
        store_pair(place + 3 * out_step, a3, b3)


@inlined
def logits_by_channel(queries, query_step, keys, channel_step, width, count, out, out_step):
    """Logits of four rows with `count` keys of which each channel's numbers are adjacent, eight keys at a time."""
    for t in range(0, count, LANES):
        key = keys + t * BYTES
        a0 = a1 = a2 = a3 = spread(NOTHING)
        if t + LANES <= count:
            for c in range(width):
                x = load(key + c * channel_step)
                a0, a1, a2, a3 = add_multiples(queries + c * BYTES, query_step, x, a0, a1, a2, a3)
        else:
            for c in range(width):
                x = load_some(key + c * channel_step, count - t)
                a0, a1, a2, a3 = add_multiples(queries + c * BYTES, query_step, x, a0, a1, a2, a3)
        place = out + t * BYTES
        store(place, a0)
        store(place + out_step, a1)
        store(place + 2 * out_step, a2)
        store(place + 3 * out_step, a3)


@inlined
def logits_packed(queries, query_step, scaled, table, owners, head, form, start, width, count, out, out_step):
    """Logits of four rows with `count` keys from token `start` on, one group of tokens after the other.

    Writes up to seven numbers more into each row of `out`. `form` is that of `attend`, `scaled` a workspace for rows
    like the queries'.
    """
    group_size, bits, element, lowest, higher, zero_in_levels = form
    t, stop = start, start + count
    while t < stop:
        token_group, skipped = t // group_size, t % group_size
        entry = table + load_short(owners + token_group * BYTES) * ENTRIES * PLACE
        tokens = min(group_size - skipped, stop - t)
        levels, plane = load_place(entry + LEVELS * PLACE), load_place(entry + PLANE * PLACE)
        first = load_place(entry + STEP * PLACE) * head + load_place(entry + FIRST * PLACE) + token_group * width
        scale = load_place(entry + SCALE * PLACE) + first * BYTES
        zero = load_place(entry + ZERO * PLACE) + first * BYTES
        shifts = scale_queries(queries, query_step, scale, zero, width, zero_in_levels, scaled)
        for i in range(0, tokens, 2 * LANES):
            left = tokens - i
            a0, a1, a2, a3 = shifts
            b0, b1, b2, b3 = shifts
            c = 0
            while c < width:  # all channels whose bits are in one plane
                p = (first + c) // plane
                upto = min(width, (p + 1) * plane - first)
                shift, place = lowest + p * higher, (first + c - p * plane) * group_size + skipped + i
                address, factors = levels + place * element, scaled + c * BYTES
                if left >= 2 * LANES:
                    for _ in range(c, upto):
                        x = load_levels(address, element, shift, bits)
                        y = load_levels(address + LANES * element, element, shift, bits)
                        a0, a1, a2, a3 = add_multiples(factors, query_step, x, a0, a1, a2, a3)
                        b0, b1, b2, b3 = add_multiples(factors, query_step, y, b0, b1, b2, b3)
                        address, factors = address + group_size * element, factors + BYTES
                else:
                    low, high = min(left, LANES), max(left - LANES, 0)
                    for _ in range(c, upto):
                        x = load_some_levels(address, element, low, shift, bits)
                        y = load_some_levels(address + LANES * element, element, high, shift, bits)
                        a0, a1, a2, a3 = add_multiples(factors, query_step, x, a0, a1, a2, a3)
                        b0, b1, b2, b3 = add_multiples(factors, query_step, y, b0, b1, b2, b3)
                        address, factors = address + group_size * element, factors + BYTES
                c = upto
            place = out + (t - start + i) * BYTES
            store_four(place, out_step, a0, a1, a2, a3)
            if left > LANES:
                store_four(place + WHOLE, out_step, b0, b1, b2, b3)
        t += tokens


@inlined
def scale_queries(queries, step, scale, zero, width, zero_in_levels, scaled):
    """Four rows of queries times the scales, into `scaled`; returns minus their products with the zero points."""
    a0 = a1 = a2 = a3 = spread(NOTHING)
    for c in range(0, width * BYTES, WHOLE):
        left = width - c // BYTES
        if left >= LANES:
            s, z = load(scale + c), load(zero + c)
        else:
            s, z = load_some(scale + c, left), load_some(zero + c, left)
        q0, q1, q2, q3 = load_four(queries + c, step)
        store_four(scaled + c, step, q0 * s, q1 * s, q2 * s, q3 * s)
        if zero_in_levels:
            z = z * s
        a0, a1, a2, a3 = a0 - q0 * z, a1 - q1 * z, a2 - q2 * z, a3 - q3 * z
    return spread(total(a0)), spread(total(a1)), spread(total(a2)), spread(total(a3))
