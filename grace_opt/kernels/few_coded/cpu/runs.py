"""Runs of a head's places: score their tokens by high bits, and attend to the chosen ones."""

from __future__ import annotations

import numpy as np

from ..._shared.jit import part
from ..._shared.memory import start_of, zeros
from ...coded.cpu import add_logits, add_values
from ...coded.cpu.channels import safe_part, sort_channels
from ...coded.cpu.products import BLOCK_STEP, BYTES, no_sums_of_four
from ...coded.cpu.rows import add_products, add_rows, clear, scale_queries
from ...coded.forms import COUNT, END, KEYS, ROWS, VALUES
from ...coded.forms import PLANES as PLANES_AT
from ...decode.cpu import cap, turn_into_shares
from ..forms import WORD
from .chosen import find_moves, find_offsets, hide_gaps, squeeze_planes
from .ranges import raise_to, score_unit

#: Numbers in a row of the codebooks, in bytes.
BOOK = 256 * BYTES


@part
def score_run(run, units, firsts, width, turned, ranges, softcap, outer, scores, upper, reach, room):
    """Score the tokens of a run: ``(first unit, the one after the last, first place, the one after the last)``."""
    shared, _ = room
    levels, order, addresses, scales, means, starts = shared[:6]
    for unit in range(run[0], run[1]):
        first, count = firsts[unit], units[unit, COUNT]
        a, b, stride = max(run[2] - first, 0), min(run[3] - first, count), (count + 7) // 8
        if a >= b:
            continue
        fields = units[unit, KEYS:]
        behind = sort_channels(
            fields, stride, width, a // 8, (b - a + 7) // 8, count * 0, levels, order, addresses, scales, means, starts
        )
        whole = safe_part(b - a, a // 8, stride, behind, units[unit, KEYS + END])
        one = a, b, stride, whole, first + a
        score_unit(one, width, turned, ranges, softcap, outer, scores, upper, reach, room)


@part
def reach_of(first, last, units, width, ranges, reach, room):
    """Raise the channels' largest coordinates to those of units that are read in any case."""
    levels, order, addresses, scales, means, starts = room[:6]
    nothing = first * 0  # no literal: the part would be compiled for it, too
    for unit in range(first, last):
        fields = units[unit, KEYS:]
        none = nothing, width, nothing, nothing, nothing
        sort_channels(fields, *none, levels, order, addresses, scales, means, starts)
        raise_to(order, scales, means, starts, ranges, reach)


@part
def read_run(run, units, firsts, widths, turned, books, softcap, outer, chosen, counts, state, room, squeezed, logits):
    """Attend to the chosen tokens of a run; its maxima, sums and products so far are in `state`."""
    largest, sums, products = state
    levels, order, addresses, scales, means, starts, _, _, scaled, totals, made, octets = room
    moves, offsets, bits, bits_at, few = squeezed
    query_step, logit_step, rows = scaled.shape[1] * BYTES, logits.shape[1] * BYTES, turned.shape[0]
    (width, value_width), (first, last, start, stop) = widths, run
    constants, nowhere = zeros((ROWS,), np.float32), books * 0  # no literal: the parts would be compiled for it, too
    step_of_book, at_start, none = nowhere + BOOK, nowhere, no_sums_of_four()
    nothing = nowhere, nowhere, nowhere
    place = end = nowhere
    for tensor in (KEYS, VALUES):
        if tensor == VALUES:
            for row in range(rows):
                largest[row], shrink, more = turn_into_shares(logits[row], place, largest[row])
                sums[row] = sums[row] * shrink + more
                if shrink != 1:
                    for c in range(value_width):
                        products[row, c] *= shrink
        wide, place = width if tensor == KEYS else value_width, nowhere
        for unit in range(first, last):
            base, count = firsts[unit], units[unit, COUNT]
            a, b, stride = max(start - base, 0), min(stop - base, count), (count + 7) // 8
            if a >= b:
                continue
            word, words = (base + a) // WORD, (b - a + WORD - 1) // WORD
            own = counts[word : word + words]
            find_offsets(own, offsets)
            if offsets[words] == 0:
                continue
            find_moves(chosen[word : word + words], moves)
            fields, size = units[unit, tensor:], (b - a + 7) // 8
            read = stride, wide, a // 8, size, size * 0
            behind = sort_channels(fields, *read, levels, order, addresses, scales, means, starts)
            planes = fields[PLANES_AT], (behind - fields[PLANES_AT]) // stride
            step = squeeze_planes(planes, a // 8, stride, fields[END], words, moves, offsets, bits, few)
            for i in range(wide):
                bits_at[i] = start_of(bits) + (addresses[i] - fields[PLANES_AT]) // stride * step
            some, at = (offsets[words] + BLOCK_STEP - 1) // BLOCK_STEP * BLOCK_STEP * 8, start_of(bits_at)
            end = place + some
            for row in range(0, rows, ROWS):
                to, four = start_of(logits[row]) + place * BYTES, turned[row : row + ROWS]
                if tensor == KEYS:
                    scale_queries(four, width, order, scales, means, constants, scaled)
                    given = start_of(scaled), query_step, constants, books, step_of_book
                    add_logits(at, starts, at_start, step, some, *given, to, logit_step, none, (octets, nothing), None)
                    for r in range(row, row + ROWS):
                        if softcap:
                            cap(logits[r, place:end], outer)
                        hide_gaps(own, offsets, logits[r, place:end])
                else:
                    clear(totals, value_width)
                    clear(made, value_width)
                    given_values = to, logit_step, books, step_of_book, start_of(totals)
                    add_values(at, starts, at_start, step, some, *given_values, none, (octets, nothing), None)
                    mine = logits[row : row + ROWS], place, end, totals, value_width
                    add_products(*mine, order, scales, means, made)
                    add_rows(made, value_width, products[row : row + ROWS])
            place = end
        if place == 0:
            break
