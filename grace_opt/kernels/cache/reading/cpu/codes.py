"""Codes of queries, in how many bits those of 256 stored tokens differ from them, and which tokens are drawn.

Bits of a hyperplane are side by side for all tokens, so the numbers of differing bits are added up for all of them at
once (`grace_opt.kernels._shared.bits`).
"""

from __future__ import annotations

import math

import numpy as np

from ...._shared.bits import (
    BYTES,
    SUMS,
    WORDS,
    add_differing,
    append_bits,
    differing,
    four_differing,
    load_bits,
    spread_bits,
)
from ...._shared.jit import inlined
from ...._shared.lanes import load_short, store
from ...._shared.limits import BITS, BITS_AT_ONCE
from ...._shared.memory import array_at, start_of

#: Bytes of an int32, and numbers of a vector.
WORD, EIGHT = 4, 8
NONE, EVERY = np.int32(0), np.int32(-1)
#: arcsin(s) / s by powers of s², highest first: interpolated at Chebyshev nodes for s² <= 1/4, off by 1e-12.
ARCSINE = (
    0.032956304720545705,
    0.001916896813936855,
    0.020680804920722242,
    0.021855853715224086,
    0.03042810579431949,
    0.04464056556238465,
    0.07500005652902526,
    0.1666666661332003,
    1.0000000000008238,
)


@inlined
def hash_query(query, planes, step, count, products, words):
    """Write -1 for hyperplanes on whose upper side a query lies, 0 for the others; `products` is a workspace.

    `planes` is the address of the first channel's numbers, `step` the bytes to the next one's. Products are those of
    `grace_opt.kernels.cache.reading.hashes.sides_of`, in float64.
    """
    for j in range(count):
        products[j] = 0.0
    for c in range(query.shape[0]):
        number, line = query[c], array_at(planes + c * step, (count,), np.float32)
        for j in range(count):
            products[j] += number * np.float64(line[j])
    for j in range(count):
        words[j] = EVERY if products[j] >= 0 else NONE


@inlined
def draw_tokens(address, words, bits, tables, drawn):
    """Write which of 256 tokens have a query's code in two tables or more, from the address of their bits."""
    one = two = spread_bits(NONE)
    every = spread_bits(EVERY)
    for _ in range(tables):
        differences = spread_bits(NONE)
        for _ in range(bits // 4):
            differences = four_differing(differences, address, words)
            address += 4 * BYTES
            words += 4 * WORD
        for _ in range(bits % 4):
            differences = differing(differences, address, words)
            address += BYTES
            words += WORD
        equal = differences ^ every
        two = two | (one & equal)
        one = one | equal
    store(start_of(drawn), two)


@inlined
def count_differing(address, words, planes, counters, counts):
    """Write for 256 tokens how many of the bits at an address are not the query's; `counters` is a workspace.

    The number of planes is a multiple of sixteen.
    """
    to, levels = start_of(counters), counters.shape[0]
    ones = twos = fours = eights = spread_bits(NONE)
    for level in range(levels):
        store(to + level * BYTES, ones)
    for j in range(0, planes, BITS_AT_ONCE):
        ones, twos, fours, eights, carried = add_differing(
            (ones, twos, fours, eights), address + j * BYTES, words + j * WORD
        )
        for level in range(SUMS, levels):
            place = to + level * BYTES
            counter = load_bits(place)
            store(place, counter ^ carried)
            carried = counter & carried
    store(to, ones)
    store(to + BYTES, twos)
    store(to + 2 * BYTES, fours)
    store(to + 3 * BYTES, eights)
    for word in range(WORDS):
        for eight in range(0, BITS // WORDS, EIGHT):
            numbers = spread_bits(NONE)
            for level in range(levels - 1, -1, -1):
                numbers = append_bits(numbers, load_short(to + level * BYTES + word * WORD), eight)
            store(start_of(counts) + (word * BITS // WORDS + eight) * WORD, numbers)


@inlined
def angle(cosine):
    """The angle of a cosine, as a share of the straight one; math.acos takes many times as long."""
    far = abs(cosine) > 0.5
    square = 0.5 * max(1.0 - abs(cosine), 0.0) if far else cosine * cosine
    result = ARCSINE[0]
    for place in range(1, len(ARCSINE)):
        result = result * square + ARCSINE[place]
    result *= (math.sqrt(square) if far else cosine) / math.pi
    if not far:
        return 0.5 - result
    return 2.0 * result if cosine > 0 else 1.0 - 2.0 * result


@inlined
def sampling_probability(equal, bits, tables):
    """The probability that a token is drawn, if a bit is equal with probability `equal`.

    It is what `grace_opt.kernels.cache.reading.hashes.log_sampling_probability` is the logarithm of.
    """
    code, others = 1.0, tables - 1
    for _ in range(bits):
        code *= equal
    if others * code < 1e-3:  # the first terms of its series, of which the next is 1e-10 times as large
        return 0.5 * tables * others * code**2 * (1 - 2 / 3 * (tables - 2) * code * (1 - 0.375 * (tables - 3) * code))
    power, factor, left = 1.0, 1.0 - code, others
    while left:
        if left & 1:
            power *= factor
        factor *= factor
        left >>= 1
    return 1.0 - power * (1.0 + others * code)
