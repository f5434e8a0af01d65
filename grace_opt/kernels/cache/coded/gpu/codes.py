"""Codes of four bits and more on the GPU: a byte each, of up to eight bit planes, and the numbers that they stand for.

Source: as for :mod:`grace_opt.kernels.cache.coded.gpu`, which says what is computed, and why in this way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import read_low_planes, read_words


@triton.jit
def swapped(a, b, mask: tl.constexpr, shift: tl.constexpr):
    """Two words, after the bits of `a` at ``mask << shift`` and those of `b` at `mask` have changed places."""
    change = ((a >> shift) ^ b) & mask
    return a ^ (change << shift), b ^ change


@triton.jit
def transposed(p0, p1, p2, p3, p4, p5, p6, p7):
    """Eight planes as words of codes, (.., 2, 2, 2) by the bits of i: byte n of word i is the code of token 8 n + i."""
    p0, p4 = swapped(p0, p4, 0x0F0F0F0F, 4)
    p1, p5 = swapped(p1, p5, 0x0F0F0F0F, 4)
    p2, p6 = swapped(p2, p6, 0x0F0F0F0F, 4)
    p3, p7 = swapped(p3, p7, 0x0F0F0F0F, 4)
    p0, p2 = swapped(p0, p2, 0x33333333, 2)
    p1, p3 = swapped(p1, p3, 0x33333333, 2)
    p4, p6 = swapped(p4, p6, 0x33333333, 2)
    p5, p7 = swapped(p5, p7, 0x33333333, 2)
    p0, p1 = swapped(p0, p1, 0x55555555, 1)
    p2, p3 = swapped(p2, p3, 0x55555555, 1)
    p4, p5 = swapped(p4, p5, 0x55555555, 1)
    p6, p7 = swapped(p6, p7, 0x55555555, 1)
    low = tl.join(tl.join(p0, p1), tl.join(p2, p3))
    high = tl.join(tl.join(p4, p5), tl.join(p6, p7))
    return tl.join(low, high)


@triton.jit
def read_codes(numbers, last, place, bits, planes, stride, first, words, longer, TRELLIS: tl.constexpr):
    """Codes of four to eight bits, as `transposed` puts them together; with fewer than eight, the next bit is set.

    `first`, `longer` and `TRELLIS` as for `read_low_planes`.
    """
    offset = planes * stride
    p0, p1 = read_low_planes(numbers, last, place, offset, stride, first, words, longer, TRELLIS)
    if TRELLIS:  # the third plane that is read is the second that is stored
        offset -= tl.where(longer, stride, 0)
    p4 = read_words(numbers, tl.where(bits > 4, last, 0), place, offset + 4 * stride, words)
    p5 = read_words(numbers, tl.where(bits > 5, last, 0), place, offset + 5 * stride, words)
    p6 = read_words(numbers, tl.where(bits > 6, last, 0), place, offset + 6 * stride, words)
    p7 = read_words(numbers, tl.where(bits > 7, last, 0), place, offset + 7 * stride, words)
    return transposed(
        p0,
        p1,
        read_words(numbers, last, place, offset + 2 * stride, words),
        read_words(numbers, last, place, offset + 3 * stride, words),
        tl.where(bits == 4, 0xFFFFFFFF, p4),
        tl.where(bits == 5, 0xFFFFFFFF, p5),
        tl.where(bits == 6, 0xFFFFFFFF, p6),
        tl.where(bits == 7, 0xFFFFFFFF, p7),
    )


@triton.jit
def look_up(levels, codes, ASSEMBLY: tl.constexpr):
    """Levels, each loaded where tensor cores take it: the compiler would pass what it loads through shared memory.

    The upper half of an address is that of the first one.
    """
    if ASSEMBLY:
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; .reg .b64 place; mov.b64 {low, high}, $1; mad.lo.u32 low, $2, 2, low; "
            "mov.b64 place, {low, high}; ld.global.nc.u16 $0, [place]; }",
            "=h,l,r",
            [levels.to(tl.int64), codes],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        ).to(tl.float16, bitcast=True)
    else:
        numbers = tl.load(levels + codes)
    return numbers
