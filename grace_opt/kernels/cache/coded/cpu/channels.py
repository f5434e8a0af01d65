"""The channels of one unit, a class of tokens of one head, as the loops over them want them: sorted by their widths."""

from __future__ import annotations

import numpy as np

from ...._shared.jit import inlined
from ...._shared.lanes import compute, load_byte, load_one
from ...._shared.memory import start_of
from ...decode.cpu import ZERO
from ..forms import HEAD_SCALE, LEVEL, LEVEL_BYTES, LEVELS, MEANS, PLANES, SCALES, WIDTHS
from .levels import load_half
from .products import BLOCK, BLOCK_STEP

#: Bits of a code by the place of its width: those of `WIDTHS`, then seven, which no code has, but one of a trellis is
#: read as. Where the channels of all end.
READ_BITS = (*WIDTHS, 7)
ALL = len(READ_BITS)
#: Of `READ_BITS`, the last one that a code of a trellis has, and what it is read as.
LAST, LAST_READ = 6, 8
#: Bytes of a float16, and of a line of the processor's caches.
HALF, CACHE_LINE = 2, 64


@inlined
def sort_channels(fields, stride, width, offset, size, longer, levels, order, places, scales, means, starts):
    """Sort the channels of keys, or values, by their widths; fetch the bits that are read next.

    Parameters
    ----------
    fields : (8,) int64
        What `grace_opt.kernels.cache.coded.forms` lists.
    stride, width : int
        Bytes of a plane, and number of channels.
    offset, size : int
        Where in each plane reading begins, and how many bytes are read; none are fetched if 0.
    longer : int
        1 if codes are those of a trellis, which are read as one bit more; else 0.
    levels : (d,) int64
        Workspace: the place of each channel's width.
    order, places, scales : (d,)
        Written: the channel, the address of its first plane and its scale, by widths.
    means : (d,) float32
        Written: of each channel, in their own order.
    starts : (10,) int64
        Written: where channels of each of `READ_BITS` begin, as they are read.

    Returns
    -------
    int
        The address behind the unit's last plane.
    """
    bits, skip, first, head_scale = fields[LEVELS], fields[LEVEL_BYTES], fields[LEVEL], load_one(fields[HEAD_SCALE])
    for level in range(ALL + 1):
        starts[level] = 0
    for c in range(width):
        level = level_of(bits, skip, first + c)
        levels[c] = level
        starts[read_as(level, longer) + 1] += 1
        means[c] = load_half(fields[MEANS] + c * HALF) * head_scale
    for level in range(ALL):
        starts[level + 1] += starts[level]
    planes, scale = 0, fields[SCALES]
    for c in range(width):
        level = levels[c]
        read = read_as(level, longer)
        place = starts[read]
        starts[read] += 1
        order[place], places[place] = c, fields[PLANES] + planes * stride
        if level > 0:
            scales[place] = load_half(scale) * head_scale
            scale += HALF
        else:
            scales[place] = ZERO  # by which sums are multiplied that nothing was added to
        planes += WIDTHS[level]
    for level in range(ALL, 0, -1):
        starts[level] = starts[level - 1]
    starts[0] = 0
    if size > 0:
        fetch(fields[PLANES] + offset, size, stride, planes)
    return fields[PLANES] + planes * stride


@inlined
def read_as(level, longer):
    """The place in `READ_BITS` of how codes of a width are read."""
    if longer == 0 or level == 0 or level > LAST:
        return level
    return level + longer if level < LAST else level * 0 + LAST_READ


@inlined
def fetch(address, size, stride, planes):
    """Bring `size` bytes of each plane into the processor's caches, from an address in the first plane on.

    These are hundreds of streams, more than the processor predicts. They are read, many at the same time; of as many
    prefetch requests, it drops most.
    """
    seen = np.int64(0)
    for _ in range(planes):
        for line in range(address, address + size - 1, CACHE_LINE):
            seen += np.int64(load_byte(line))
        seen += np.int64(load_byte(address + size - 1))
        address += stride
    compute(seen)


@inlined
def level_of(bits, skip, number):
    """The index of a channel's width."""
    address, shift = bits + number // 8, number % 8
    low, middle, high = (
        np.int64(load_byte(address)),
        np.int64(load_byte(address + skip)),
        np.int64(load_byte(address + 2 * skip)),
    )
    return (low >> shift & 1) | (middle >> shift & 1) << 1 | (high >> shift & 1) << 2


@inlined
def safe_part(count, offset, stride, behind, end):
    """Return how many of `count` tokens, from a byte of each plane on, are read in blocks without leaving memory.

    All, with what stands in the next planes, unless the unit's last plane is the last of all.
    """
    beyond = offset + (count + BLOCK - 1) // BLOCK * BLOCK_STEP - stride
    return (count + BLOCK - 1) // BLOCK * BLOCK if behind + beyond <= end else count // BLOCK * BLOCK


@inlined
def copy_rest(places, starts, offset, step, count, planes, copies, copy_places):
    """Copy bytes of every plane from an offset on, fewer than `BLOCK_STEP`, to where as many may be read; `planes` says
    how many planes a channel of each width has."""
    place, copies_address = 0, start_of(copies)
    for level in range(1, 8):
        for i in range(starts[level], starts[level + 1]):
            copy_places[i] = copies_address + place
            for plane in range(planes[level]):
                for byte in range(count):
                    copies[place + byte] = load_byte(places[i] + offset + plane * step + byte)
                place += BLOCK_STEP


@inlined
def part_of(column, count, start, stop):
    """Return which tokens of a unit, whose first is in a column, belong to a split: from one up to another.

    A split ends at a whole block.
    """
    first, last = min(max(start - column, 0), count), min(max(stop - column, 0), count)
    return first // BLOCK * BLOCK if first < count else count, last // BLOCK * BLOCK if last < count else count
