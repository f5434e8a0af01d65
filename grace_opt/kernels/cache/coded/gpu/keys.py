"""Logits of a split of coded tokens on the GPU, by group of channels.

Source: as for :mod:`grace_opt.kernels.cache.coded.gpu`, which says what is computed, and why in this way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import look_up, read_codes
from .levels import BOOK
from .numbers import (
    MORE_BITS,
    ONE_BIT,
    THREE_BITS,
    TWO_BITS,
    halves,
    planes_of,
    read_low_planes,
    read_words,
    where_planes,
)

#: A bit at either place is a float16 of 2; so two bits, sixteen apart, are two numbers.
TWOS = tl.constexpr(0x40004000)


@triton.jit
def add_signs(x, a, b, weights, N: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, T: tl.constexpr):
    """Logits plus twice each bit of planes times its weight: words ``(W, CHANNELS)`` of a first and a second plane.

    Token t of x is bit ``t // W`` of word ``t % W``; weights have the two planes of a channel side by side.
    """
    low, high = (a & 0xFFFF) | (b << 16), (a >> 16) | (b & 0xFFFF0000)
    both = tl.permute(tl.join(low, high), (2, 0, 1))
    bit = tl.arange(0, 16)[None, :, None, None]
    up, down = tl.maximum(14 - bit, 0).to(tl.uint32), tl.maximum(bit - 14, 0).to(tl.uint32)
    bits = ((both[:, None, :, :] << up) >> down) & TWOS
    numbers = tl.reshape(halves(tl.reshape(bits, [T, CHANNELS])), [T, 2 * CHANNELS])
    row, column = tl.arange(0, 2 * CHANNELS), tl.arange(0, N)
    return tl.dot(numbers, tl.load(weights + row[:, None] * N + column[None, :]), x)


@triton.jit
def coded_logits(
    x, fields, slots, chunks, weights, levels, low_levels, first, stride,
    N: tl.constexpr, W: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr,
    TRELLIS: tl.constexpr,
):  # fmt: skip
    """Sums over the channels of keys, by group: of signs by `add_signs`, of numbers of more bits from their levels."""
    words, eight = tl.arange(0, W)[:, None], tl.arange(0, 8)
    numbers, last, place = where_planes(fields, first)
    for _ in range(tl.load(chunks)):
        _b, one = planes_of(tl.load(slots + 2 * eight))
        _b, other = planes_of(tl.load(slots + 2 * eight + 1))
        a = read_words(numbers, last, place, (one * stride)[None, :], words)
        b = read_words(numbers, last, place, (other * stride)[None, :], words)
        x = add_signs(x, a, b, weights, N, W, 8, T)
        slots += ONE_BIT
        weights += ONE_BIT * N
    for _ in range(tl.load(chunks + 1)):
        _b, planes = planes_of(tl.load(slots + eight))
        offset = (planes * stride)[None, :]
        a, b = read_low_planes(numbers, last, place, offset, stride, first, words, True, TRELLIS)
        x = add_signs(x, a, b, weights, N, W, 8, T)
        slots += TWO_BITS
        weights += 2 * TWO_BITS * N
    for _ in range(tl.load(chunks + 2)):
        _b, planes = planes_of(tl.load(slots + eight))
        offset = (planes * stride)[None, :]
        a, b = read_low_planes(numbers, last, place, offset, stride, first, words, True, TRELLIS)
        c = read_words(numbers, last, place, offset + (1 if TRELLIS else 2) * stride, words)
        x = add_signs(x, a, b, weights, N, W, 8, T)
        x = add_signs(x, c, a ^ b ^ c, weights + 2 * THREE_BITS * N, N, W, 8, T)
        slots += THREE_BITS
        weights += 4 * THREE_BITS * N
    column, sixteen = tl.arange(0, N), tl.arange(0, 16)
    shorter = tl.load(chunks + 3)
    for number in range(shorter + tl.load(chunks + 4)):
        one, one_planes = planes_of(tl.load(slots + 2 * eight))
        other, other_planes = planes_of(tl.load(slots + 2 * eight + 1))
        few, planes, others = number < shorter, one_planes[None, :], other_planes[None, :]
        a = read_codes(numbers, last, place, one[None, :], planes, stride, first, words, few, TRELLIS)
        b = read_codes(numbers, last, place, other[None, :], others, stride, first, words, few, TRELLIS)
        of_row, book = tl.load(weights + sixteen[:, None] * N + column[None, :]), tl.where(few, 0, BOOK)
        x = tl.dot(levels_of_keys(levels + book, a, b, T, ASSEMBLY), of_row, x)
        if EXACT:
            x = tl.dot(levels_of_keys(low_levels + book, a, b, T, ASSEMBLY), of_row, x)
        slots += MORE_BITS
        weights += MORE_BITS * N
    return x


@triton.jit
def levels_of_keys(levels, a, b, T: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return (T, 16) levels of codes ``(W, 8, 2, 2, 2)`` of two channels each; tokens as `add_signs` has them."""
    byte = (8 * tl.arange(0, 4)).to(tl.uint32)[:, None, None, None, None, None]
    first = (tl.permute(a, (4, 3, 2, 0, 1))[None, :, :, :, :, :] >> byte) & 255
    second = (tl.permute(b, (4, 3, 2, 0, 1))[None, :, :, :, :, :] >> byte) & 255
    first = look_up(levels, tl.reshape(first, [T, 8]), ASSEMBLY)
    second = look_up(levels, tl.reshape(second, [T, 8]), ASSEMBLY)
    return tl.reshape(tl.join(first, second), [T, 16])
