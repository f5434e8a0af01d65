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
from numba.extending import intrinsic

from ..._shared.jit import part
from ..._shared.lanes import WIDEST, load_byte, load_place
from ...coded.cpu.products import PAIR_STEP
from ...coded.forms import WIDTHS
from ...decode.cpu import NOTHING

#: Words of a vector, bytes of a word, and steps.
WORDS, PLACE, STEPS = WIDEST // 2, 8, 6
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, WORDS)


@intrinsic
def squeeze(typing_context, at, moves, step, to):
    """Write a vector's words with their chosen bits at the low end; `moves` is the address of the chosen bits, `step`
    bytes later comes what moves first."""

    def generate(context, builder, signature, arguments):
        at, moves, step, to = arguments

        def vector(address, align):
            return builder.load(builder.inttoptr(address, _VECTOR.as_pointer()), align=align)

        found = builder.and_(vector(at, 1), vector(moves, 8))
        for number in range(STEPS):
            moves = builder.add(moves, step)
            moving = builder.and_(found, vector(moves, 8))
            moved = builder.lshr(moving, ir.Constant(_VECTOR, [1 << number] * WORDS))
            found = builder.or_(builder.xor(found, moving), moved)
        builder.store(found, builder.inttoptr(to, _VECTOR.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def store_word(typing_context, address, word):
    """Write an int64 to an address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


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
    """Write where the bits of each word begin, in bytes, and where those of the last end."""
    offsets[0] = 0
    for n in range(counts.shape[0]):
        offsets[n + 1] = offsets[n] + (counts[n] + 7) // 8


@part
def squeeze_planes(addresses, starts, offset, stride, end, moves, offsets, bits, bits_at, few):
    """Copy the chosen bits of all planes of a unit.

    Parameters
    ----------
    addresses, starts
        Of each channel's first plane; where channels of each width begin.
    offset, stride, end : int
        First byte of each plane; bytes of a plane; the address behind all planes.
    moves, offsets
        As `find_moves` and `find_offsets` wrote them, for whole vectors of words.
    bits, bits_at
        Written: the bits, and the address of each channel's first plane.
    few : uint8
        Room for a vector.

    Returns
    -------
    int
        Bytes from plane to plane.
    """
    count, size = offsets.shape[0] - 1, WORDS * PLACE
    step = (offsets[count] + PAIR_STEP - 1) // PAIR_STEP * PAIR_STEP
    to, moves_at, moves_step = bits.ctypes.data, moves.ctypes.data, moves.shape[1] * PLACE
    room, vector = few.ctypes.data, few[size:].ctypes.data
    for level in range(1, 8):
        for i in range(starts[level], starts[level + 1]):
            bits_at[i] = to
            at = addresses[i] + offset
            for _ in range(WIDTHS[level]):
                for first in range(0, count, WORDS):
                    last = min(first + WORDS, count)
                    if offsets[first] == offsets[last]:
                        continue
                    here = at + first * PLACE
                    if here + size > end:
                        for byte in range(min(end - here, size)):
                            few[byte] = load_byte(here + byte)
                        here = room
                    squeeze(here, moves_at + first * PLACE, moves_step, vector)
                    for n in range(first, last):
                        store_word(to + offsets[n], load_place(vector + (n - first) * PLACE))
                at += stride
                to += step
    return step


@part
def hide_gaps(counts, offsets, line):
    """Write minus infinity where bytes of a word's bits are not full."""
    for n in range(counts.shape[0]):
        for t in range(offsets[n] * 8 + counts[n], offsets[n + 1] * 8):
            line[t] = NOTHING
    start = offsets[counts.shape[0]]
    for t in range(start * 8, (start + PAIR_STEP - 1) // PAIR_STEP * PAIR_STEP * 8):
        line[t] = NOTHING


@part
def room_for_chosen(width, words):
    """Room for the chosen tokens of some words: what moves, offsets, bits, their addresses, and a few bytes."""
    return (
        np.zeros((STEPS + 1, words + WORDS), np.uint64),
        np.zeros(words + 1, np.int64),
        np.empty(width * 8 * (words * PLACE + PAIR_STEP) + 2 * PLACE, np.uint8),
        np.zeros(width, np.int64),
        np.zeros(2 * WORDS * PLACE, np.uint8),
    )
