"""What the GPU's kernels read of one unit, a class of tokens of one head: its channels, and the numbers of its codes.

Everything is read by address, as :mod:`grace_opt.kernels.coded.table` lists it, and some channels at a time: registers
suffice for heads of any width. Where a channel's planes and its scale are depends on the widths of all channels before
it, so `list_channels` adds these up once, in four bytes per channel of a unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import forms

PLANES, LEVELS, LEVEL_BYTES, LEVEL, SCALES, MEANS, UNIT = (
    tl.constexpr(field)
    for field in (forms.PLANES, forms.LEVELS, forms.LEVEL_BYTES, forms.LEVEL, forms.SCALES, forms.MEANS, forms.UNIT)
)
FIELDS, KEYS, VALUES = (tl.constexpr(field) for field in (forms.FIELDS, forms.KEYS, forms.VALUES))
#: Bits of an index into `forms.WIDTHS`, and the only index that is not the width itself: 7 means 8 bits.
LEVEL_BITS, EIGHT_BITS = tl.constexpr(3), tl.constexpr(7)
#: Where a listed channel has the number of planes before its own, and the number of scales; its bits come first.
PLANE_SHIFT, SCALE_SHIFT = tl.constexpr(4), tl.constexpr(16)
#: Numbers in a row of the codebooks.
BOOK = tl.constexpr(256)


@triton.jit
def list_channels(units, listed, width, value_width, WIDTH: tl.constexpr):
    """List the channels of one unit's keys, or values: (all units, 2, WIDTH) int32."""
    unit, of_values = tl.program_id(0).to(tl.int64), tl.program_id(1)
    fields = units + unit * FIELDS + tl.where(of_values == 0, KEYS, VALUES)
    channels = tl.arange(0, WIDTH)
    exists = channels < tl.where(of_values == 0, width, value_width)
    bit = tl.load(fields + LEVEL) + channels
    at = tl.load(fields + LEVELS).to(tl.pointer_type(tl.uint8)) + bit // 8
    step, shift = tl.load(fields + LEVEL_BYTES), (bit % 8).to(tl.int32)
    level = tl.zeros([WIDTH], tl.int32)
    for place in tl.static_range(LEVEL_BITS):
        found = tl.load(at + place * step, mask=exists, other=0).to(tl.int32)
        level |= ((found >> shift) & 1) << place
    bits = tl.where(level == EIGHT_BITS, 8, level)
    has_scale = (level > 0).to(tl.int32)  # only these are stored
    planes_before, scales_before = tl.cumsum(bits, 0) - bits, tl.cumsum(has_scale, 0) - has_scale
    found = bits | (planes_before << PLANE_SHIFT) | (scales_before << SCALE_SHIFT)
    tl.store(listed + (unit * 2 + of_values) * WIDTH + channels, found)


@triton.jit
def read_channels(fields, listed, channels, width):
    """Of some channels of a unit's keys or values: bits, number of planes before their own, scales, means."""
    exists = channels < width
    found = tl.load(listed + channels, mask=exists, other=0)
    bits, planes_before = found & 15, (found >> PLANE_SHIFT) & 0xFFF
    unit = tl.load(tl.load(fields + UNIT).to(tl.pointer_type(tl.float32)))
    scales = tl.load(fields + SCALES).to(tl.pointer_type(tl.float16)) + (found >> SCALE_SHIFT)
    means = tl.load(fields + MEANS).to(tl.pointer_type(tl.float16)) + channels
    scale = tl.load(scales, mask=bits > 0, other=0.0).to(tl.float32) * unit
    mean = tl.load(means, mask=exists, other=0.0).to(tl.float32) * unit
    return bits, planes_before, scale, mean


@triton.jit
def spread(byte):
    """Each bit of a byte moved to the lowest bit of a nibble of its own, of an int32."""
    byte = (byte | (byte << 12)) & 0x000F000F
    byte = (byte | (byte << 6)) & 0x03030303
    return (byte | (byte << 3)) & 0x11111111


@triton.jit
def read_numbers(fields, bits, planes_before, stride, first, books, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(channels, tokens) what codes stand for before scale and mean, of a block from token `first` on, a multiple of 8.

    `stride` is the number of bytes of a plane. A byte holds a bit of eight tokens. Up to four planes are first put
    together as nibbles, eight tokens at a time. Tokens that the unit does not have, and channels without bits, get
    finite numbers: they have no share, and a scale of zero.
    """
    byte = (first // 8 + tl.arange(0, BLOCK // 8)).to(tl.int32)
    at = tl.load(fields + PLANES).to(tl.pointer_type(tl.uint8))
    place = (planes_before * stride)[:, None] + byte[None, :]
    inside = (byte < stride)[None, :]
    low = tl.zeros([CHUNK, BLOCK // 8], tl.int32)
    high = tl.zeros([CHUNK, BLOCK // 8], tl.int32)
    for plane in tl.static_range(4):
        found = tl.load(at + (place + plane * stride), mask=(plane < bits)[:, None] & inside, other=0)
        low |= spread(found.to(tl.int32)) << plane
    if tl.max(bits, axis=0) > 4:
        for plane in tl.static_range(4, 8):
            found = tl.load(at + (place + plane * stride), mask=(plane < bits)[:, None] & inside, other=0)
            high |= spread(found.to(tl.int32)) << (plane - 4)
    shift = (4 * tl.arange(0, 8))[None, None, :]
    code = ((low[:, :, None] >> shift) & 15) | (((high[:, :, None] >> shift) & 15) << 4)
    number = tl.load(books + (tl.maximum(bits, 1) * BOOK)[:, None, None] + code)
    return tl.reshape(number, [CHUNK, BLOCK])
