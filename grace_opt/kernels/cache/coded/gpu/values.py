"""Sums of the values of a split of coded tokens on the GPU, by group of channels.

Source: as for :mod:`grace_opt.kernels.cache.coded.gpu`, which says what is computed, and why in this way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import look_up, read_codes
from .keys import TWOS
from .levels import BOOK, SIGNS
from .numbers import (
    MORE_BITS,
    NO_BITS,
    ONE_BIT,
    THREE_BITS,
    TWO_BITS,
    halves,
    read_low_planes,
    read_slots,
    read_words,
    where_planes,
)

#: What shares, of at most 1, are multiplied by: small ones lose nothing to the least float16.
SHARE = tl.constexpr(1024.0)


@triton.jit
def joined_limbs(x, ROWS: tl.constexpr, R: tl.constexpr):
    """Return the sums of high and low limbs, which are side by side."""
    return tl.sum(tl.reshape(x, [ROWS, R, 2]), axis=2)


@triton.jit
def by_values(shares, N: tl.constexpr, W: tl.constexpr, T: tl.constexpr):
    """Shares (T, N) of tokens as `add_signs` has them, in the order of `sums_of_signs`."""
    parts = tl.reshape(shares, [2, 8, 2, W // 4, 4, N])  # halves of a word, its bits, words
    return tl.reshape(tl.permute(parts, (3, 1, 4, 2, 0, 5)), [T, N])


@triton.jit
def sums_of_signs(w, shares, ROWS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, T: tl.constexpr):
    """Return (ROWS, R) shares of tokens whose bit is set, twice: words ``(ROWS, W / 4, 4)``, shares as `by_values`."""
    bit = 2 * tl.arange(0, 8)[:, None, None] + tl.arange(0, 2)[None, None, :]
    bit = bit[None, None, :, :, :]
    up, down = tl.maximum(14 - bit, 0).to(tl.uint32), tl.maximum(bit - 14, 0).to(tl.uint32)
    bits = ((w[:, :, None, :, None] << up) >> down) & TWOS
    numbers = tl.reshape(halves(tl.reshape(bits, [ROWS, T // 2])), [ROWS, T])
    return joined_limbs(tl.dot(numbers, shares), ROWS, R)


@triton.jit
def levels_of_values(levels, codes, T: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return (16, T) levels of codes ``(16, W / 4, 4, 2, 2, 2)``; tokens as `by_values` has them."""
    codes = tl.permute(codes, (0, 1, 5, 4, 2, 3))[:, :, None, :, :, :, :]  # a byte before the bits of its word
    byte = (8 * tl.arange(0, 2)).to(tl.uint32)[None, None, :, None, None, None, None]
    first, second = (codes >> byte) & 255, ((codes >> 16) >> byte) & 255
    first = look_up(levels, tl.reshape(first, [16, T // 2]), ASSEMBLY)
    second = look_up(levels, tl.reshape(second, [16, T // 2]), ASSEMBLY)
    return tl.reshape(tl.join(first, second), [16, T])


@triton.jit
def store_values(
    added, shares, fields, slots, chunks, levels, low_levels, signs, first, stride, products, row_exists,
    R: tl.constexpr, W: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr,
    TRELLIS: tl.constexpr,
):  # fmt: skip
    """Store the sums of values, by group of channels; `products` has the addresses of the rows."""
    words = 4 * tl.arange(0, W // 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
    eight, sixteen = tl.arange(0, 8), tl.arange(0, 16)
    numbers, last, place = where_planes(fields, first)
    for _ in range(tl.load(chunks)):
        exists, channels, _b, planes, scale, mean = read_slots(fields, tl.load(slots + sixteen))
        w = read_words(numbers, last, place, (planes * stride)[:, None, None], words)
        sums = sums_of_signs(w, shares, 16, R, W, T) / SHARE - added[None, :]
        store_rows(sums * tl.load(signs + SIGNS), added, exists, channels, scale, mean, products, row_exists)
        slots += ONE_BIT
    for _ in range(tl.load(chunks + 1)):
        exists, channels, _b, planes, scale, mean = read_slots(fields, tl.load(slots + eight))
        offset = (planes * stride)[:, None, None]
        a, b = read_low_planes(numbers, last, place, offset, stride, first, words, True, TRELLIS)
        w = tl.reshape(tl.permute(tl.join(a, b), (3, 0, 1, 2)), [16, W // 4, 4])
        sums = tl.reshape(sums_of_signs(w, shares, 16, R, W, T) / SHARE - added[None, :], [2, 8, R])
        factor = tl.load(signs + 2 * SIGNS + tl.arange(0, 2))
        sums = tl.sum(sums * factor[:, None, None], axis=0)
        store_rows(sums, added, exists, channels, scale, mean, products, row_exists)
        slots += TWO_BITS
    for _ in range(tl.load(chunks + 2)):
        exists, channels, _b, planes, scale, mean = read_slots(fields, tl.load(slots + eight))
        offset = (planes * stride)[:, None, None]
        a, b = read_low_planes(numbers, last, place, offset, stride, first, words, True, TRELLIS)
        c = read_words(numbers, last, place, offset + (1 if TRELLIS else 2) * stride, words)
        w = tl.join(tl.join(a, b), tl.join(c, a ^ b ^ c))  # the last axis has the two pairs
        w = tl.reshape(tl.permute(w, (4, 3, 0, 1, 2)), [32, W // 4, 4])
        sums = tl.reshape(sums_of_signs(w, shares, 32, R, W, T) / SHARE - added[None, :], [4, 8, R])
        factor = tl.load(signs + 3 * SIGNS + tl.arange(0, 4))
        sums = tl.sum(sums * factor[:, None, None], axis=0)
        store_rows(sums, added, exists, channels, scale, mean, products, row_exists)
        slots += THREE_BITS
    shorter = tl.load(chunks + 3)
    for number in range(shorter + tl.load(chunks + 4)):
        exists, channels, bits, planes, scale, mean = read_slots(fields, tl.load(slots + sixteen))
        few, bits, planes = number < shorter, bits[:, None, None], planes[:, None, None]
        codes = read_codes(numbers, last, place, bits, planes, stride, first, words, few, TRELLIS)
        book = tl.where(few, 0, BOOK)
        sums = joined_limbs(tl.dot(levels_of_values(levels + book, codes, T, ASSEMBLY), shares), 16, R)
        if EXACT:
            low = levels_of_values(low_levels + book, codes, T, ASSEMBLY)
            sums += joined_limbs(tl.dot(low, shares), 16, R)
        store_rows(sums / SHARE, added, exists, channels, scale, mean, products, row_exists)
        slots += MORE_BITS
    for _ in range(tl.load(chunks + 5)):
        exists, channels, _b, planes, scale, mean = read_slots(fields, tl.load(slots + sixteen))
        store_rows(tl.zeros([16, R], tl.float32), added, exists, channels, scale, mean, products, row_exists)
        slots += NO_BITS


@triton.jit
def store_rows(sums, added, exists, channels, scale, mean, products, row_exists):
    """Store (channels, rows) sums of values: scaled, with their mean as often as there are shares."""
    tl.store(
        products[None, :] + channels[:, None],
        sums * scale[:, None] + mean[:, None] * added[None, :],
        mask=exists[:, None] & row_exists[None, :],
    )
