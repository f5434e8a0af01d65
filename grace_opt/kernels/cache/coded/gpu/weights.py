"""Before the splits of coded tokens on the GPU: queries in the coordinates of a unit's keys, as weights of its planes.

A number of b bits, of a symmetric book, is a sum of signs: of its bits, and with three bits of the product of all
three, which is the sign of their exclusive or. So the product of a query with a key is a sum of signs times weights:
a number of the query times the scale of the channel times the sign's factor. Weights are stored as two float16
numbers, which together have 22 bits; a power of two for each row keeps them in range.

Source: as for :mod:`grace_opt.kernels.cache.coded.gpu`, which says what is computed, and why in this way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .levels import MOST, SIGNS
from .numbers import MORE_BITS, MOST_BITS, ONE_BIT, SIZES, THREE_BITS, TWO_BITS, read_slots

#: Weights of a unit are at most 2 to this power.
LARGEST = tl.constexpr(12)


def weight_rows(width: int) -> int:
    """Return the most weights that a unit of so many channels has: four a channel, and the empty slots' own."""
    return 4 * width + 4 * sum(SIZES)


@triton.jit
def power_of_two(exponent):
    """Return 2 to the power of an exponent from -126 to 127, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def turned_queries(
    from_rows, query_channel, row_exists, basis, width, channels, exists,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (16, SLOTS) numbers of queries for some channels of the keys' coordinates."""
    # No branch: Triton 3.6 does not compile what both would have in common.
    turned = tl.load(
        from_rows[:, None] + channels[None, :] * query_channel,
        mask=row_exists[:, None] & (exists & (basis == 0))[None, :],
        other=0.0,
    ).to(tl.float32)
    numbers = basis.to(tl.pointer_type(tl.float32))
    for start in range(0, tl.where(basis == 0, 0, width), CHUNK):
        inside = start + tl.arange(0, CHUNK)
        left = tl.load(
            from_rows[:, None] + inside[None, :] * query_channel,
            mask=row_exists[:, None] & (inside < width)[None, :],
            other=0.0,
        ).to(tl.float32)
        right = tl.load(
            numbers + channels[None, :] * width + inside[:, None],
            mask=exists[None, :] & (inside < width)[:, None],
            other=0.0,
        )
        turned += tl.dot(left, right, input_precision=PRECISION)
    return turned


@triton.jit
def weigh_unit(
    from_rows, query_channel, row_exists, basis, fields, slots, chunks, signs, weights, constants, factors, width,
    inner, R: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the weights of one unit's planes for R query rows, the sums that do not depend on tokens, and a factor."""
    N: tl.constexpr = 2 * R
    place, own = tl.arange(0, SLOTS), tl.arange(0, R)
    exists, channels, bits, _planes, scale, mean = read_slots(fields, tl.load(slots + place))
    turned = turned_queries(
        from_rows, query_channel, row_exists, basis, width, channels, exists, SLOTS, CHUNK, PRECISION
    )  # fmt: skip
    # (slots, rows): of 16 rows, which tensor cores take at least, the others are zero.
    turned = tl.trans(tl.sum(tl.reshape(turned, [16 // R, R, SLOTS]), axis=0)) * inner
    constant = tl.sum(turned * mean[:, None], axis=0)
    scaled = turned * scale[:, None]
    signed = (bits > 0) & (bits < 4)
    most = tl.load(signs + tl.where(signed, bits, 0) * SIGNS + MOST)
    size = tl.max(tl.abs(scaled) * most[:, None], axis=0)
    exponent = tl.maximum(((size.to(tl.int32, bitcast=True) >> 23) & 255) - 127, -110)
    exponent = tl.minimum(exponent, 127 - LARGEST)
    up = power_of_two(-exponent + LARGEST)
    tl.store(factors + own, power_of_two(exponent - LARGEST))
    # Where groups begin, among the slots and among the weights.
    ones, twos, threes = tl.load(chunks) * ONE_BIT, tl.load(chunks + 1) * TWO_BITS, tl.load(chunks + 2) * THREE_BITS
    more = tl.load(chunks + 3) * MORE_BITS + tl.load(chunks + 4) * MOST_BITS
    of_two, of_three, of_more = place - ones, place - ones - twos, place - ones - twos - threes
    in_one, in_two, in_three = of_two < 0, (of_two >= 0) & (of_three < 0), (of_three >= 0) & (of_more < 0)
    count = tl.where(in_three, 4, tl.where(in_two, 2, 1))
    for plane in tl.static_range(4):
        row_of_two = ones + of_two // TWO_BITS * (2 * TWO_BITS) + of_two % TWO_BITS * 2 + plane
        row_of_three = ones + 2 * twos + of_three // THREE_BITS * (4 * THREE_BITS)
        row_of_three += plane // 2 * (2 * THREE_BITS) + of_three % THREE_BITS * 2 + plane % 2
        row = tl.where(in_two, row_of_two, tl.where(in_three, row_of_three, ones + 2 * twos + 4 * threes + of_more))
        row = tl.where(in_one, place, row)
        needed = (plane < count) & (of_more < more)
        weight = scaled * tl.load(signs + bits * SIGNS + plane, mask=signed, other=1.0)[:, None]
        # Bits are read as 0 or 2, and signs are that less 1.
        constant -= tl.sum(tl.where((needed & signed)[:, None], weight, 0.0), axis=0)
        weight *= up[None, :]
        high = weight.to(tl.float16)
        low = (weight - high.to(tl.float32)).to(tl.float16)
        to = weights + row[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(to, tl.reshape(tl.join(high, low), [SLOTS, N]), mask=needed[:, None])
    tl.store(constants + own, constant)
