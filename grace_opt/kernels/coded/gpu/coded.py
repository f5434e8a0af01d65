"""A piece of the coded tokens of one head on the GPU: logits, shares, and sums of values, by tensor cores.

Source: as for :mod:`grace_opt.kernels.coded.gpu`, which says what is computed, and why in this way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...decode import forms as kinds
from ...decode.gpu.attend import LEAST, seen_logits
from .. import forms
from . import batch
from .levels import BOOK, SIGNS
from .numbers import (
    CHUNKS,
    FIELDS,
    KEYS,
    MORE_BITS,
    NO_BITS,
    ONE_BIT,
    THREE_BITS,
    TWO_BITS,
    VALUES,
    halves,
    planes_of,
    read_slots,
    read_words,
    transposed,
    where_planes,
)

NO_MASK = tl.constexpr(kinds.NO_MASK)
COUNT, NEWEST = tl.constexpr(forms.COUNT), tl.constexpr(forms.NEWEST)
FIRST_UNIT, PAIR_FIELDS = tl.constexpr(batch.FIRST_UNIT), tl.constexpr(batch.PAIR_FIELDS)
#: A bit at either place is a float16 of 2; so two bits, sixteen apart, are two numbers.
TWOS = tl.constexpr(0x40004000)
#: What shares, of at most 1, are multiplied by: small ones lose nothing to the least float16.
SHARE = tl.constexpr(1024.0)


@triton.jit
def add_signs(x, a, b, weights, N: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, T: tl.constexpr):
    """Logits plus twice each bit of planes times its weight: words ``(W, CHANNELS)`` of a first and a second plane.

    Token t of x is bit ``t // W`` of word ``t % W``; weights have the two planes of a channel side by side.
    """
    low, high = (a & 0xFFFF) | (b << 16), (a >> 16) | (b & 0xFFFF0000)
    both = tl.permute(tl.join(low, high), (2, 0, 1))
    bit = tl.arange(0, 16)[None, :, None, None]
    up, down = tl.maximum(14 - bit, 0).to(tl.uint32), tl.maximum(bit - 14, 0).to(tl.uint32)
    found = ((both[:, None, :, :] << up) >> down) & TWOS
    numbers = tl.reshape(halves(tl.reshape(found, [T, CHANNELS])), [T, 2 * CHANNELS])
    row, column = tl.arange(0, 2 * CHANNELS), tl.arange(0, N)
    return tl.dot(numbers, tl.load(weights + row[:, None] * N + column[None, :]), x)


@triton.jit
def coded_logits(
    x, fields, slots, chunks, weights, levels, low_levels, first, stride,
    N: tl.constexpr, W: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr,
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
        a = read_words(numbers, last, place, offset, words)
        b = read_words(numbers, last, place, offset + stride, words)
        x = add_signs(x, a, b, weights, N, W, 8, T)
        slots += TWO_BITS
        weights += 2 * TWO_BITS * N
    for _ in range(tl.load(chunks + 2)):
        _b, planes = planes_of(tl.load(slots + eight))
        offset = (planes * stride)[None, :]
        a = read_words(numbers, last, place, offset, words)
        b = read_words(numbers, last, place, offset + stride, words)
        c = read_words(numbers, last, place, offset + 2 * stride, words)
        x = add_signs(x, a, b, weights, N, W, 8, T)
        x = add_signs(x, c, a ^ b ^ c, weights + 2 * THREE_BITS * N, N, W, 8, T)
        slots += THREE_BITS
        weights += 4 * THREE_BITS * N
    column, sixteen = tl.arange(0, N), tl.arange(0, 16)
    some = tl.load(chunks + 3)
    for number in range(some + tl.load(chunks + 4)):
        one, one_planes = planes_of(tl.load(slots + 2 * eight))
        other, other_planes = planes_of(tl.load(slots + 2 * eight + 1))
        a = read_codes(numbers, last, place, one[None, :], one_planes[None, :], stride, words)
        b = read_codes(numbers, last, place, other[None, :], other_planes[None, :], stride, words)
        of_row, book = tl.load(weights + sixteen[:, None] * N + column[None, :]), tl.where(number < some, 0, BOOK)
        x = tl.dot(levels_of_keys(levels + book, a, b, T, ASSEMBLY), of_row, x)
        if EXACT:
            x = tl.dot(levels_of_keys(low_levels + book, a, b, T, ASSEMBLY), of_row, x)
        slots += MORE_BITS
        weights += MORE_BITS * N
    return x


@triton.jit
def levels_of_keys(levels, a, b, T: tl.constexpr, ASSEMBLY: tl.constexpr):
    """(T, 16) levels of codes ``(W, 8, 2, 2, 2)`` of a first and a second channel; tokens as `add_signs` has them."""
    byte = (8 * tl.arange(0, 4)).to(tl.uint32)[:, None, None, None, None, None]
    first = (tl.permute(a, (4, 3, 2, 0, 1))[None, :, :, :, :, :] >> byte) & 255
    second = (tl.permute(b, (4, 3, 2, 0, 1))[None, :, :, :, :, :] >> byte) & 255
    first = look_up(levels, tl.reshape(first, [T, 8]), ASSEMBLY)
    second = look_up(levels, tl.reshape(second, [T, 8]), ASSEMBLY)
    return tl.reshape(tl.join(first, second), [T, 16])


@triton.jit
def levels_of_values(levels, codes, T: tl.constexpr, ASSEMBLY: tl.constexpr):
    """(16, T) levels of codes ``(16, W / 4, 4, 2, 2, 2)``; tokens as `by_values` has them."""
    codes = tl.permute(codes, (0, 1, 5, 4, 2, 3))[:, :, None, :, :, :, :]  # a byte before the bits of its word
    byte = (8 * tl.arange(0, 2)).to(tl.uint32)[None, None, :, None, None, None, None]
    first, second = (codes >> byte) & 255, ((codes >> 16) >> byte) & 255
    first = look_up(levels, tl.reshape(first, [16, T // 2]), ASSEMBLY)
    second = look_up(levels, tl.reshape(second, [16, T // 2]), ASSEMBLY)
    return tl.reshape(tl.join(first, second), [16, T])


@triton.jit
def look_up(levels, at, ASSEMBLY: tl.constexpr):
    """Levels, each loaded where tensor cores take it: the compiler would pass what it loads through shared memory.

    The upper half of an address is that of the first one.
    """
    if ASSEMBLY:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; .reg .b64 place; mov.b64 {low, high}, $1; mad.lo.u32 low, $2, 2, low; "
            "mov.b64 place, {low, high}; ld.global.nc.u16 $0, [place]; }",
            "=h,l,r",
            [levels.to(tl.int64), at],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        ).to(tl.float16, bitcast=True)
    else:
        found = tl.load(levels + at)
    return found


@triton.jit
def read_codes(numbers, last, place, bits, planes, stride, words):
    """Codes of four to eight bits, as `transposed` puts them together; with fewer than eight, the next bit is set."""
    offset = planes * stride
    p4 = read_words(numbers, tl.where(bits > 4, last, 0), place, offset + 4 * stride, words)
    p5 = read_words(numbers, tl.where(bits > 5, last, 0), place, offset + 5 * stride, words)
    p6 = read_words(numbers, tl.where(bits > 6, last, 0), place, offset + 6 * stride, words)
    return transposed(
        read_words(numbers, last, place, offset, words),
        read_words(numbers, last, place, offset + stride, words),
        read_words(numbers, last, place, offset + 2 * stride, words),
        read_words(numbers, last, place, offset + 3 * stride, words),
        tl.where(bits == 4, 0xFFFFFFFF, p4),
        tl.where(bits == 5, 0xFFFFFFFF, p5),
        tl.where(bits == 6, 0xFFFFFFFF, p6),
        read_words(numbers, tl.where(bits > 7, last, 0), place, offset + 7 * stride, words),
    )


@triton.jit
def sums_of_signs(w, shares, ROWS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, T: tl.constexpr):
    """(ROWS, R) shares of the tokens whose bit is set, twice: words ``(ROWS, W / 4, 4)``, shares as `by_values`."""
    bit = 2 * tl.arange(0, 8)[:, None, None] + tl.arange(0, 2)[None, None, :]
    bit = bit[None, None, :, :, :]
    up, down = tl.maximum(14 - bit, 0).to(tl.uint32), tl.maximum(bit - 14, 0).to(tl.uint32)
    found = ((w[:, :, None, :, None] << up) >> down) & TWOS
    numbers = tl.reshape(halves(tl.reshape(found, [ROWS, T // 2])), [ROWS, T])
    return joined_limbs(tl.dot(numbers, shares), ROWS, R)


@triton.jit
def joined_limbs(x, ROWS: tl.constexpr, R: tl.constexpr):
    """High and low parts, which lie side by side, together."""
    return tl.sum(tl.reshape(x, [ROWS, R, 2]), axis=2)


@triton.jit
def by_values(shares, N: tl.constexpr, W: tl.constexpr, T: tl.constexpr):
    """Shares (T, N) of tokens as `add_signs` has them, in the order of `sums_of_signs`."""
    parts = tl.reshape(shares, [2, 8, 2, W // 4, 4, N])  # halves of a word, its bits, words
    return tl.reshape(tl.permute(parts, (3, 1, 4, 2, 0, 5)), [T, N])


@triton.jit
def store_values(
    added, shares, fields, slots, chunks, levels, low_levels, signs, first, stride, products, row_exists,
    R: tl.constexpr, W: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Store the sums of values, by group of channels; `products` has the addresses of the rows."""
    words = 4 * tl.arange(0, W // 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
    eight, sixteen = tl.arange(0, 8), tl.arange(0, 16)
    numbers, last, place = where_planes(fields, first)
    for _ in range(tl.load(chunks)):
        exists, channels, _b, planes, scale, mean = read_slots(fields, tl.load(slots + sixteen))
        w = read_words(numbers, last, place, (planes * stride)[:, None, None], words)
        found = sums_of_signs(w, shares, 16, R, W, T) / SHARE - added[None, :]
        store_rows(found * tl.load(signs + SIGNS), added, exists, channels, scale, mean, products, row_exists)
        slots += ONE_BIT
    for _ in range(tl.load(chunks + 1)):
        exists, channels, _b, planes, scale, mean = read_slots(fields, tl.load(slots + eight))
        offset = (planes * stride)[:, None, None]
        a = read_words(numbers, last, place, offset, words)
        b = read_words(numbers, last, place, offset + stride, words)
        w = tl.reshape(tl.permute(tl.join(a, b), (3, 0, 1, 2)), [16, W // 4, 4])
        found = tl.reshape(sums_of_signs(w, shares, 16, R, W, T) / SHARE - added[None, :], [2, 8, R])
        factor = tl.load(signs + 2 * SIGNS + tl.arange(0, 2))
        found = tl.sum(found * factor[:, None, None], axis=0)
        store_rows(found, added, exists, channels, scale, mean, products, row_exists)
        slots += TWO_BITS
    for _ in range(tl.load(chunks + 2)):
        exists, channels, _b, planes, scale, mean = read_slots(fields, tl.load(slots + eight))
        offset = (planes * stride)[:, None, None]
        a = read_words(numbers, last, place, offset, words)
        b = read_words(numbers, last, place, offset + stride, words)
        c = read_words(numbers, last, place, offset + 2 * stride, words)
        w = tl.join(tl.join(a, b), tl.join(c, a ^ b ^ c))  # the last axis has the two pairs
        w = tl.reshape(tl.permute(w, (4, 3, 0, 1, 2)), [32, W // 4, 4])
        found = tl.reshape(sums_of_signs(w, shares, 32, R, W, T) / SHARE - added[None, :], [4, 8, R])
        factor = tl.load(signs + 3 * SIGNS + tl.arange(0, 4))
        found = tl.sum(found * factor[:, None, None], axis=0)
        store_rows(found, added, exists, channels, scale, mean, products, row_exists)
        slots += THREE_BITS
    some = tl.load(chunks + 3)
    for number in range(some + tl.load(chunks + 4)):
        exists, channels, bits, planes, scale, mean = read_slots(fields, tl.load(slots + sixteen))
        codes = read_codes(numbers, last, place, bits[:, None, None], planes[:, None, None], stride, words)
        book = tl.where(number < some, 0, BOOK)
        found = joined_limbs(tl.dot(levels_of_values(levels + book, codes, T, ASSEMBLY), shares), 16, R)
        if EXACT:
            low = levels_of_values(low_levels + book, codes, T, ASSEMBLY)
            found += joined_limbs(tl.dot(low, shares), 16, R)
        store_rows(found / SHARE, added, exists, channels, scale, mean, products, row_exists)
        slots += MORE_BITS
    for _ in range(tl.load(chunks + 5)):
        exists, channels, _b, planes, scale, mean = read_slots(fields, tl.load(slots + sixteen))
        store_rows(tl.zeros([16, R], tl.float32), added, exists, channels, scale, mean, products, row_exists)
        slots += NO_BITS


@triton.jit
def store_rows(found, added, exists, channels, scale, mean, products, row_exists):
    """Store (channels, rows) sums of values: scaled, with their mean as often as there are shares."""
    tl.store(
        products[None, :] + channels[:, None],
        found * scale[:, None] + mean[:, None] * added[None, :],
        mask=exists[:, None] & row_exists[None, :],
    )


@triton.jit(do_not_specialize=["newest", "every", "pieces_per_head"])
def attend_codes(
    pairs, units, slots, chunks, weights, constants, factors, pieces, levels, low_levels, signs, newest_out,
    largest_out, sums_out, products_out, heads, value_width, newest, every, pieces_per_head, weight_rows, outer,
    SOFTCAP: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    SLOTS: tl.constexpr, VALUE_WIDTH: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """One piece of one pair, and up to R of its query rows: their logits, and what the piece adds to their sums."""
    N: tl.constexpr = 2 * R
    W: tl.constexpr = T // 32
    number, piece, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = number.to(tl.int64)
    rows = part * R + tl.arange(0, R)
    row_exists = rows < ROWS
    place = (pair * every + piece) * ROWS + rows
    products = products_out + place * value_width
    of_sequence = pieces + ((number // heads) * pieces_per_head + piece) * 2
    own_unit, first = tl.load(of_sequence), tl.load(of_sequence + 1)
    if own_unit < 0:  # another sequence has more
        tl.store(largest_out + place, tl.full([R], LEAST, tl.float32), mask=row_exists)
        tl.store(sums_out + place, tl.zeros([R], tl.float32), mask=row_exists)
        channels = tl.arange(0, VALUE_WIDTH)
        tl.store(
            products[:, None] + channels[None, :],
            tl.zeros([R, VALUE_WIDTH], tl.float32),
            mask=row_exists[:, None] & (channels < value_width)[None, :],
        )
    else:
        unit = tl.load(pairs + pair * PAIR_FIELDS + FIRST_UNIT) + own_unit
        fields = units + unit * FIELDS
        count, newest_place = tl.load(fields + COUNT), tl.load(fields + NEWEST)
        stride, at = tl.cdiv(count, 8).to(tl.int32), unit * tl.num_programs(2) + part
        x = coded_logits(
            tl.zeros([T, N], tl.float32), fields + KEYS, slots + unit * 2 * SLOTS, chunks + unit * 2 * CHUNKS,
            weights + at * weight_rows * N, levels, low_levels, first, stride, N, W, T, EXACT, ASSEMBLY,
        )  # fmt: skip
        factor, constant = tl.load(factors + at * R + tl.arange(0, R)), tl.load(constants + at * R + tl.arange(0, R))
        x = joined_limbs(x, T, R) * factor[None, :] + constant[None, :]
        token = tl.arange(0, T)
        token = first + 32 * (token % W) + token // W
        exists = token < count
        x = seen_logits(tl.trans(x), token, exists, weights, 0, row_exists, newest_place, outer, NO_MASK, SOFTCAP)
        known = exists & (newest_place >= 0) & (newest_place + token < newest)
        to_newest = newest_out + (pair * ROWS + rows) * newest + newest_place
        tl.store(to_newest[:, None] + token[None, :], x, mask=row_exists[:, None] & known[None, :])
        largest = tl.maximum(tl.max(x, axis=1), LEAST)
        share = tl.exp2(x - largest[:, None])
        added = tl.sum(share, axis=1)
        tl.store(largest_out + place, largest, mask=row_exists)
        tl.store(sums_out + place, added, mask=row_exists)
        share = tl.trans(share) * SHARE
        high = share.to(tl.float16)
        low = (share - high.to(tl.float32)).to(tl.float16)
        shares = by_values(tl.reshape(tl.join(high, low), [T, N]), N, W, T)
        store_values(
            added, shares, fields + VALUES, slots + (unit * 2 + 1) * SLOTS, chunks + (unit * 2 + 1) * CHUNKS, levels,
            low_levels, signs, first, stride, products, row_exists, R, W, T, EXACT, ASSEMBLY,
        )  # fmt: skip
