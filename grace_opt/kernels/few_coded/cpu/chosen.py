"""Copy the bits of chosen tokens side by side, plane by plane, to where the loops over codes read them.

A word has the bits of 64 tokens. Those of the chosen ones move to its low end in six steps, each by a power of two;
which bits move in which step depends on the tokens alone, so it is found once for all planes. Words then follow each
other byte by byte: the gaps, of less than a byte each, are hidden later.

Source: Warren, "Hacker's Delight" (2012), section 7-4, compress; several words at a time in a vector.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..._shared.jit import part
from ..._shared.lanes import WIDEST, load_byte, load_place
from ..._shared.memory import empty, start_of, zeros
from ...coded.cpu.products import BLOCK_STEP
from ...decode.cpu import NOTHING

#: Words of a vector, bytes of a word, and steps.
WORDS, PLACE, STEPS = WIDEST // 2, 8, 6
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, WORDS)


@intrinsic
def squeeze(typing_context, at, stride, count, moves, moves_step, to, step, offsets):
    """Write a vector's words of some planes, their chosen bits at the low end, to where offsets say, in order: each
    word covers the end of the one before. `moves` is the address of the chosen bits; a step later is what moves
    first."""

    def generate(context, builder, signature, arguments):
        at, stride, count, moves, moves_step, to, step, offsets = arguments

        def vector(address, align):
            return builder.load(builder.inttoptr(address, _VECTOR.as_pointer()), align=align)

        masks, places = [vector(moves, 8)], []
        for _ in range(STEPS):
            moves = builder.add(moves, moves_step)
            masks.append(vector(moves, 8))
        for number in range(WORDS):
            place = builder.inttoptr(builder.add(offsets, ir.Constant(_WORD, number * PLACE)), _WORD.as_pointer())
            places.append(builder.add(to, builder.load(place, align=8)))
        with cgutils.for_range(builder, count) as loop:
            found = builder.and_(vector(builder.add(at, builder.mul(loop.index, stride)), 1), masks[0])
            for number, mask in enumerate(masks[1:]):
                moving = builder.and_(found, mask)
                moved = builder.lshr(moving, ir.Constant(_VECTOR, [1 << number] * WORDS))
                found = builder.or_(builder.xor(found, moving), moved)
            plane = builder.mul(loop.index, step)
            for number, place in enumerate(places):
                word = builder.extract_element(found, ir.Constant(ir.IntType(32), number))
                builder.store(word, builder.inttoptr(builder.add(place, plane), _WORD.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8), generate


@part
def find_moves(words, moves):
    """Write the chosen bits of some words ``(n,)`` uint64, and what moves in each step, ``(7, n)``."""
    for n in range(words.shape[0]):
        left = words[n]
        moves[0, n] = left
        free = ~left << 1
        for number in range(STEPS):
            odd = free ^ free << 1
            for shift in (2, 4, 8, 16, 32):
                odd ^= odd << shift
            moving = odd & left
            moves[number + 1, n] = moving
            left = left ^ moving | moving >> (1 << number)
            free &= ~odd


@part
def find_offsets(counts, offsets):
    """Write where the bits of each word begin, in bytes, and where those of the last end, to the end of a vector."""
    count, found = counts.shape[0], 0
    for n in range(count):
        offsets[n] = found
        found += (counts[n] + 7) // 8
    for n in range(count, (count + WORDS) // WORDS * WORDS + 1):
        offsets[n] = found


@part
def squeeze_planes(planes, offset, stride, end, count, moves, offsets, bits, few):
    """Copy the chosen bits of a unit's planes.

    Parameters
    ----------
    planes : (int, int)
        Address and number of the planes, which follow each other.
    offset, stride, end, count : int
        First byte of each plane; bytes of a plane; the address behind what may be read; number of words.
    moves, offsets
        As `find_moves` and `find_offsets` wrote them.
    bits
        Written: the bits.
    few : uint8
        Room for a vector.

    Returns
    -------
    int
        Bytes from plane to plane.
    """
    size, offsets_at, room = WORDS * PLACE, np.int64(start_of(offsets)), np.int64(start_of(few))
    step = (offsets[count] + PLACE + BLOCK_STEP - 1) // BLOCK_STEP * BLOCK_STEP  # room for the last word's end
    to, moves_at, moves_step = np.int64(start_of(bits)), np.int64(start_of(moves)), moves.shape[1] * PLACE
    for first in range(0, count * PLACE, size):
        if load_place(offsets_at + first) == load_place(offsets_at + first + size):
            continue
        here, to_plane = planes[0] + offset + first, to
        safe, left = min(max((end - size - here) // stride + 1, 0), planes[1]), planes[1]
        while left > 0:
            if safe == 0:
                for byte in range(min(end - here, size)):
                    few[byte] = load_byte(here + byte)
            some, at = (safe, here) if safe else (1, room)
            squeeze(at, stride, some, moves_at + first, moves_step, to_plane, step, offsets_at + first)
            left, here, to_plane, safe = left - some, here + some * stride, to_plane + some * step, 0
    return step


@part
def hide_gaps(counts, offsets, line):
    """Write minus infinity where bytes of a word's bits are not full."""
    for n in range(counts.shape[0]):
        for t in range(offsets[n] * 8 + counts[n], offsets[n + 1] * 8):
            line[t] = NOTHING
    start = offsets[counts.shape[0]]
    for t in range(start * 8, (start + BLOCK_STEP - 1) // BLOCK_STEP * BLOCK_STEP * 8):
        line[t] = NOTHING


@part
def room_for_chosen(width, words):
    """Room for the chosen tokens of some words: what moves, offsets, bits, their addresses, and a few bytes."""
    return (
        zeros((STEPS + 1, words + WORDS), np.uint64),
        zeros((words + 2 * WORDS,), np.int64),
        empty((width * 8 * (words * PLACE + PLACE + BLOCK_STEP),), np.uint8),
        zeros((width,), np.int64),
        zeros((WORDS * PLACE,), np.uint8),
    )
