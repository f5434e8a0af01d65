"""Scales, codes and bit planes of rows of numbers, compiled: every loop runs along a row, in the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...._shared.jit import c_function, inlined, jit
from ...._shared.lanes import WIDEST
from ...._shared.memory import array_at, empty, view, zeros
from ...._shared.threads import array_of, call_with
from ..reference import BEYOND, FITTING_STEPS, LARGEST, PART, PER_BYTE, Codebooks, levels_read, positive
from .trellis import code_by_trellis

#: Up to this number of bits, a code is the number of edges below, counted in vectors; with more, bisection is faster.
COUNTED = 6
#: All bits of a float32 but its sign.
SIGNLESS = np.int32(0x7FFFFFFF)
#: Eight bytes of 0 or 1, and the factor that brings them together in the highest byte.
ONES, TOGETHER = np.uint64(0x0101010101010101), np.uint64(0x0102040810204080)


def scaled_and_coded(
    rows: Tensor, means: Tensor, widths: Tensor, counts: Sequence[int], books: Codebooks
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `grace_opt.kernels.cache.coding.scaled_and_coded`."""
    rows_array, means_array, levels, edges = (
        array_of(tensor, torch.float32) for tensor in (rows, means, books.levels, books.edges)
    )
    trellis = array_of(levels_read(books), torch.float32)
    wide, sizes = array_of(widths, torch.uint8), np.array(counts, dtype=np.int64)
    fitted = np.zeros(wide.shape, dtype=np.float32)
    arrays = rows_array, means_array, wide, sizes, levels, edges, fitted
    call_with(fit_at, arrays, (*rows_array.shape, len(sizes), *levels.shape, edges.shape[1], books.even))
    scales = torch.from_numpy(fitted).clamp_(max=LARGEST).to(torch.float16)
    numbers = wide.sum(1, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(numbers * -(-sizes // PER_BYTE))])
    every = np.empty(starts[-1], dtype=np.uint8)
    to_code = rows_array, means_array, wide, sizes, edges, trellis, array_of(scales, torch.float32), every
    call_with(code_at, to_code, (*rows_array.shape, len(sizes), *edges.shape, *trellis.shape, books.even, len(every)))
    planes = (
        torch.from_numpy(every[starts[c] : starts[c + 1]].reshape(numbers[c], -(-size // PER_BYTE)))
        for c, size in enumerate(counts)
    )
    return scales, tuple(planes)


def weighted_squares(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """See `grace_opt.kernels.cache.coding.weighted_squares`."""
    heads, width, _ = rows.shape
    large, squares = np.zeros(heads, np.int32), np.zeros((heads, len(counts), width))
    sizes = np.array(counts, dtype=np.int64)
    arrays = array_of(rows, torch.float32), array_of(weights, torch.float32), sizes, large, squares
    call_with(sum_squares_at, arrays, (*rows.shape, len(sizes)))
    largest = torch.from_numpy(large.view(np.float32))
    return largest, torch.from_numpy(squares).div_(positive(largest).double().square()[:, None, None])


# The sums may take any order, which vectors need.
@jit(fastmath={"reassoc", "contract"}, error_model="numpy")
def mean(row):
    """Return the mean, summed in float64."""
    total = 0.0
    for t in range(row.shape[0]):
        total += np.float64(row[t])
    return total / row.shape[0]


@jit(fastmath={"reassoc", "contract"}, error_model="numpy")
def weighted(row, centre, weights):
    """Return the weighted sum of the squares around a number, in float64."""
    total = 0.0
    for t in range(row.shape[0]):
        difference = np.float64(row[t]) - centre
        total += np.float64(weights[t]) * difference * difference
    return total


@inlined
def largest_bits(row):
    """Return the bits of the largest absolute value: as integers, they are in the same order, and fit vectors."""
    bits, largest = view(row, np.int32), np.int32(0)
    for t in range(row.shape[0]):
        size = bits[t] & SIGNLESS
        largest = size if size > largest else largest
    return largest


@inlined(error_model="numpy")
def sum_squares(rows, weights, counts, large, squares):
    """Fill the bits of the largest number of each head (H,), and the sums (H, C, d)."""
    for h in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            row = rows[h, j]
            large[h] = max(large[h], largest_bits(row))
            middle = mean(row)
            first = 0
            for c in range(counts.shape[0]):
                stop = first + counts[c]
                squares[h, c, j] = weighted(row[first:stop], middle, weights[h, first:stop])
                first = stop


@jit(fastmath={"reassoc", "contract"}, error_model="numpy")
def mean_square(row):
    """Return the mean of the squares, summed in float64."""
    total = 0.0
    for t in range(row.shape[0]):
        total += np.float64(row[t]) * np.float64(row[t])
    return total / row.shape[0]


@inlined(error_model="numpy")
def nearest_levels(sizes, scale, edges, levels, out):
    """Write the nearest of the ascending levels to each size, both in units of the scale."""
    for t in range(sizes.shape[0]):
        out[t] = levels[0]
    for e in range(edges.shape[0]):
        edge, level = edges[e] * scale, levels[e + 1]
        for t in range(sizes.shape[0]):
            out[t] = level if sizes[t] > edge else out[t]


@jit(fastmath={"reassoc", "contract"}, error_model="numpy")
def step_of(sizes, scale, numbers):
    """Return by how much the scale changes if every size counts by its squared error; `numbers` are their levels."""
    products, squares = 0.0, 0.0
    for t in range(sizes.shape[0]):
        number = np.float64(numbers[t])
        error = np.float64(sizes[t]) - np.float64(scale) * number
        products += error * error * error * number
        squares += error * error * number * number
    return products / squares


@inlined(error_model="numpy")
def centre(row, mean, out):
    """Write the differences from the mean."""
    for t in range(row.shape[0]):
        out[t] = row[t] - mean


@inlined(error_model="numpy")
def nearest(scaled, edges, bits, codes):
    """Write the code of every number of a row."""
    for t in range(codes.shape[0]):
        codes[t] = 0
    if bits <= COUNTED:
        for e in range((1 << bits) - 1):
            edge = edges[e]
            for t in range(codes.shape[0]):
                codes[t] += np.uint8(scaled[t] > edge)
        return
    for t in range(codes.shape[0]):
        below, half = 0, 1 << (bits - 1)
        while half > 0:
            if edges[below + half - 1] < scaled[t]:
                below += half
            half >>= 1
        codes[t] = below


@inlined
def longest_of(counts):
    """The largest of some sizes."""
    longest = 0
    for count in counts:
        longest = max(longest, count)
    return longest


@inlined(error_model="numpy")
def fit(rows, means, widths, counts, levels, edges, even, scales):
    """Fill the scales (C, R) float32 of rows that have bits.

    rows : (R, n) float32; means : (R,) float32; widths : (C, R) uint8; counts : (C,) int64
    levels : (M, 256) float32; edges : (M, 255) float32; even : int64, as `Codebooks` has them
    """
    longest, bits_of_scales = longest_of(counts), view(scales, np.int32)
    centred, numbers = empty((longest,), np.float32), empty((longest,), np.float32)
    for r in range(rows.shape[0]):
        first = 0
        for c in range(counts.shape[0]):
            count, bits = counts[c], widths[c, r]
            if bits and count:
                sizes = centred[:count]
                centre(rows[r, first : first + count], means[r], sizes)
                bits_of_scales[c, r] = largest_bits(sizes)
                if bits != even:
                    for t in range(count):
                        sizes[t] = abs(sizes[t])
                    half = 1 << (bits - 1)
                    upper = edges[bits, half : 2 * half - 1], levels[bits, half : 2 * half]
                    reach = upper[1][half - 1] + BEYOND * count ** (1 / 3) / (1 << bits)
                    scale = max(np.float32(np.sqrt(mean_square(sizes))), np.float32(scales[c, r] / reach))
                    for _ in range(FITTING_STEPS):
                        nearest_levels(sizes, scale, *upper, numbers)
                        better = np.float32(scale + PART * step_of(sizes, scale, numbers))
                        scale = better if better > 0 else scale
                    scales[c, r] = scale
            first += count


@inlined(error_model="numpy")
def scale_down(row, mean, scale, out):
    """Write a row's differences from the mean, divided by its scale."""
    centre(row, mean, out)
    divisor = scale if scale > 0 else np.float32(1.0)
    for t in range(row.shape[0]):
        out[t] /= divisor


@inlined
def pack(eights, bits, size, planes, place):
    """Write the planes of a row of codes, of which each number holds eight."""
    for p in range(bits):
        for i in range(size):
            planes[place + i] = (((eights[i] >> np.uint64(p)) & ONES) * TOGETHER) >> np.uint64(56)
        place += size


@inlined(error_model="numpy")
def code(rows, means, widths, counts, edges, trellis, even, scales, planes):
    """Fill the planes (P,) uint8 of all classes, one class after the other.

    rows : (R, n) float32; means : (R,) float32; widths : (C, R) uint8; counts : (C,) int64
    edges : (M, 255) float32; trellis : (M or 0, 256) float32, levels as they are read; even : int64
    scales : (C, R) float32
    """
    longest = longest_of(counts)
    workspace = empty((WIDEST * (longest + WIDEST),), np.float32)
    eights = zeros(((longest + PER_BYTE - 1) // PER_BYTE,), np.uint64)
    codes = view(eights, np.uint8)
    starts, trellis_coded = empty((rows.shape[0],), np.int64), empty((rows.shape[0],), np.int64)
    place, first = np.int64(0), 0
    for c in range(counts.shape[0]):
        count, own, number = counts[c], widths[c], 0
        size = (count + PER_BYTE - 1) // PER_BYTE
        for r in range(rows.shape[0]):
            starts[r] = place
            place += size * own[r]
        # Rows of equal widths side by side, as what takes the most bits in a vector takes its time.
        for bits in range(trellis.shape[0] if count else 0):
            for r in range(rows.shape[0]):
                if own[r] == bits and bits != even and bits:
                    trellis_coded[number] = r
                    number += 1
        columns = (count + WIDEST - 1) // WIDEST * WIDEST
        scaled = workspace[: WIDEST * columns].reshape(WIDEST, columns)
        for start in range(0, number, WIDEST):
            lanes = trellis_coded[start : min(start + WIDEST, number)]
            for lane in range(lanes.shape[0]):
                r = lanes[lane]
                scale_down(rows[r, first : first + count], means[r], scales[c, r], scaled[lane])
            code_by_trellis(scaled, count, lanes, own, trellis, planes, starts)
        for r in range(rows.shape[0]):
            bits = own[r]
            if bits and count and (bits == even or not trellis.shape[0]):
                scale_down(rows[r, first : first + count], means[r], scales[c, r], workspace)
                nearest(workspace, edges[bits], bits, codes[:count])
                for t in range(count, size * PER_BYTE):
                    codes[t] = 0
                pack(eights, bits, size, planes, starts[r])
        first += count


# As Python calls them: with the addresses of the arrays, and their sizes.


@c_function("void(intp)")
def sum_squares_at(data):
    """Call `sum_squares`."""
    table = array_at(data, (9,), np.int64)
    heads, width, columns, classes = table[5], table[6], table[7], table[8]
    sum_squares(
        array_at(table[0], (heads, width, columns), np.float32),
        array_at(table[1], (heads, columns), np.float32),
        array_at(table[2], (classes,), np.int64),
        array_at(table[3], (heads,), np.int32),
        array_at(table[4], (heads, classes, width), np.float64),
    )


@c_function("void(intp)")
def fit_at(data):
    """Call `fit`."""
    table = array_at(data, (14,), np.int64)
    rows, columns, classes, widest = table[7], table[8], table[9], table[10]
    fit(
        array_at(table[0], (rows, columns), np.float32),
        array_at(table[1], (rows,), np.float32),
        array_at(table[2], (classes, rows), np.uint8),
        array_at(table[3], (classes,), np.int64),
        array_at(table[4], (widest, table[11]), np.float32),
        array_at(table[5], (widest, table[12]), np.float32),
        table[13],
        array_at(table[6], (classes, rows), np.float32),
    )


@c_function("void(intp)")
def code_at(data):
    """Call `code`."""
    table = array_at(data, (17,), np.int64)
    rows, columns, classes, widest, between = table[8], table[9], table[10], table[11], table[12]
    code(
        array_at(table[0], (rows, columns), np.float32),
        array_at(table[1], (rows,), np.float32),
        array_at(table[2], (classes, rows), np.uint8),
        array_at(table[3], (classes,), np.int64),
        array_at(table[4], (widest, between), np.float32),
        array_at(table[5], (table[13], table[14]), np.float32),
        table[15],
        array_at(table[6], (classes, rows), np.float32),
        array_at(table[7], (table[16],), np.uint8),
    )
