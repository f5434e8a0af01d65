"""What the GPU's kernels read of one unit, a class of tokens of one head: its channels, in groups of equal bits, and
the words of their bit planes.

Everything is read by address, as :mod:`grace_opt.kernels.cache.coded.table` lists it. Where a channel's planes and its
scale are depends on the widths of all channels before it, and channels are read together with others of as many bits.
So `list_channels` gives each channel of a unit a slot, once for many steps, in four bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import forms

PLANES, END, LEVELS, LEVEL_BYTES, LEVEL, SCALES, MEANS, HEAD_SCALE = (
    tl.constexpr(field)
    for field in (
        *(forms.PLANES, forms.END, forms.LEVELS, forms.LEVEL_BYTES, forms.LEVEL),
        *(forms.SCALES, forms.MEANS, forms.HEAD_SCALE),
    )
)
FIELDS, KEYS, VALUES = (tl.constexpr(field) for field in (forms.FIELDS, forms.KEYS, forms.VALUES))
#: Bits of an index into `forms.WIDTHS`, and the only index that is not the width itself: 7 means 8 bits.
LEVEL_BITS, EIGHT_BITS = tl.constexpr(3), tl.constexpr(7)
#: Groups of channels: of 1, 2 and 3 bits, of 4 to 7, of 8, and of none; how many of each are read together.
SIZES = (16, 8, 8, 16, 16, 16)
#: Numbers that `list_channels` stores of a unit's keys, or values: of each group, how often that many are read.
CHUNKS = tl.constexpr(8)
#: Slots that are empty because groups begin at multiples of their size, at most.
PADDING = sum(SIZES) - len(SIZES)
#: Where a slot has its channel's bits, the number of planes before its own, and of scales; the channel comes first.
BITS_SHIFT, PLANE_SHIFT, SCALE_SHIFT = tl.constexpr(8), tl.constexpr(12), tl.constexpr(23)
EMPTY = -1

_SIZES = tuple(tl.constexpr(size) for size in SIZES)
ONE_BIT, TWO_BITS, THREE_BITS, MORE_BITS, MOST_BITS, NO_BITS = _SIZES


@triton.jit
def list_channels(
    units, slots, chunks, width, value_width, WIDTH: tl.constexpr, SLOTS: tl.constexpr, TRELLIS: tl.constexpr
):
    """Give the channels of one unit's keys, or values, slots: (all units, 2, SLOTS) int32, which are `EMPTY` before.

    A slot has the bits of codes as they are read, with a trellis one more than their planes.
    """
    unit, of_values = tl.program_id(0).to(tl.int64), tl.program_id(1)
    fields = units + unit * FIELDS + tl.where(of_values == 0, KEYS, VALUES)
    channels = tl.arange(0, WIDTH)
    exists = channels < tl.where(of_values == 0, width, value_width)
    bit = tl.load(fields + LEVEL) + channels
    address = tl.load(fields + LEVELS).to(tl.pointer_type(tl.uint8)) + bit // 8
    step, shift = tl.load(fields + LEVEL_BYTES), (bit % 8).to(tl.int32)
    level = tl.zeros([WIDTH], tl.int32)
    for place in tl.static_range(LEVEL_BITS):
        word = tl.load(address + place * step, mask=exists, other=0).to(tl.int32)
        level |= ((word >> shift) & 1) << place
    bits = tl.where(level == EIGHT_BITS, 8, level)
    has_scale = (level > 0).to(tl.int32)  # only these are stored
    planes_before, scales_before = tl.cumsum(bits, 0) - bits, tl.cumsum(has_scale, 0) - has_scale
    if TRELLIS:
        bits = tl.where((bits > 0) & (bits < 8), bits + 1, bits)
    listed = channels | (bits << BITS_SHIFT) | (planes_before << PLANE_SHIFT) | (scales_before << SCALE_SHIFT)
    first, place = 0, (unit * 2 + of_values) * CHUNKS
    slot = tl.zeros([WIDTH], tl.int32)
    for group in tl.static_range(6):
        if group == 0:
            inside, size = bits == 1, ONE_BIT
        elif group == 1:
            inside, size = bits == 2, TWO_BITS
        elif group == 2:
            inside, size = bits == 3, THREE_BITS
        elif group == 3:
            inside, size = (bits > 3) & (bits < 8), MORE_BITS
        elif group == 4:
            inside, size = bits == 8, MOST_BITS
        else:
            inside, size = bits == 0, NO_BITS
        inside = inside & exists
        counted = tl.cumsum(inside.to(tl.int32), 0)
        slot = tl.where(inside, first + counted - 1, slot)
        number = (tl.sum(inside.to(tl.int32), axis=0) + size - 1) // size
        tl.store(chunks + place + group, number)
        first += number * size
    tl.store(slots + (unit * 2 + of_values) * SLOTS + slot, listed, mask=exists)


@triton.jit
def planes_of(slots):
    """Return what some slots list: bits, and the number of planes before their own; none for empty ones."""
    slots = tl.where(slots >= 0, slots, 0)
    return (slots >> BITS_SHIFT) & 15, (slots >> PLANE_SHIFT) & 0x7FF


@triton.jit
def read_slots(fields, slots):
    """Return what some slots list: if there is a channel, which one, its bits, planes before its own, scale, mean."""
    bits, planes = planes_of(slots)
    exists = slots >= 0
    channels = tl.where(exists, slots & 255, 0)
    head_scale = tl.load(tl.load(fields + HEAD_SCALE).to(tl.pointer_type(tl.float32)))
    scales = tl.load(fields + SCALES).to(tl.pointer_type(tl.float16)) + ((slots >> SCALE_SHIFT) & 255)
    means = tl.load(fields + MEANS).to(tl.pointer_type(tl.float16)) + channels
    scale = tl.load(scales, mask=bits > 0, other=0.0).to(tl.float32) * head_scale
    mean = tl.load(means, mask=exists, other=0.0).to(tl.float32) * head_scale
    return exists, channels, bits, planes, scale, mean


@triton.jit
def where_planes(fields, first):
    """Return where the planes of a unit's keys or values are: words, number of these, and the byte of token `first`."""
    address, end = tl.load(fields + PLANES), tl.load(fields + END)
    start = address & -4
    last = ((end - start + 3) >> 2).to(tl.int32)  # no word without a byte of the planes: it may not be ours to read
    return start.to(tl.pointer_type(tl.uint32)), last, ((address - start) + first // 8).to(tl.int32)


@triton.jit
def read_words(numbers, last, place, offset, words):
    """Read 32 tokens of bit planes, `offset` bytes from the first: those from ``32 * words`` on; uint32.

    Planes begin at any byte, so that a word is put together of two. Tokens that a unit does not have are any bits.
    """
    byte = place + offset + 4 * words
    word, shift = byte >> 2, ((byte & 3) << 3).to(tl.uint32)
    low = tl.load(numbers + word, mask=word < last, other=0)
    high = tl.load(numbers + word + 1, mask=word < last - 1, other=0)
    return (low >> shift) | ((high << 1) << (shift ^ 31))


@triton.jit
def read_low_planes(numbers, last, place, offset, stride, first, words, longer, TRELLIS: tl.constexpr):
    """The two lowest planes of codes as they are read, of a unit's tokens from `first` on: those that are stored or,
    with a trellis and where `longer`, what the lowest one becomes (`grace_opt.kernels.cache.coding.trellis`)."""
    own = read_words(numbers, last, place, offset, words)
    if TRELLIS:
        begins = (words == 0) & (first == 0)
        before = read_words(numbers, tl.where(longer, last, 0), place, offset, tl.where(begins, words, words - 1))
        before = tl.where(begins, 0, before)
        high = own ^ ((own << 2) | (before >> 30)) ^ ((own << 3) | (before >> 29))
        next_plane = read_words(numbers, tl.where(longer, 0, last), place, offset + stride, words)
        low, high = tl.where(longer, (own << 1) | (before >> 31), own), tl.where(longer, high, next_plane)
    else:
        low, high = own, read_words(numbers, last, place, offset + stride, words)
    return low, high


@triton.jit
def halves(words):
    """Return (.., n) words of two float16 each as (.., n, 2) numbers."""
    low = words.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high)
