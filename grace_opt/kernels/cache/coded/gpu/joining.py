"""What comes after the splits, on the GPU: these joined, values back from their coordinates, attention received.

Source: as for :mod:`grace_opt.kernels.cache.coded.gpu`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...decode.gpu.attend import LEAST
from . import batch

PAIR_FIELDS, VALUE_BASIS = tl.constexpr(batch.PAIR_FIELDS), tl.constexpr(batch.VALUE_BASIS)


@triton.jit
def times_basis(
    from_rows, channel_step, row_exists, basis, basis_row, basis_column, width, columns,
    ROW_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the `columns` of rows times a basis, (rows, CHUNK); its address is 0 if coordinates are the numbers."""
    needed = row_exists[:, None] & (columns < width)[None, :]
    if basis == 0:
        turned = tl.load(from_rows[:, None] + columns[None, :] * channel_step, mask=needed, other=0.0).to(tl.float32)
    else:
        turned = tl.zeros([ROW_BLOCK, CHUNK], tl.float32)
        numbers = basis.to(tl.pointer_type(tl.float32))
        for start in range(0, width, CHUNK):
            channels = start + tl.arange(0, CHUNK)
            inside = channels < width
            left = tl.load(
                from_rows[:, None] + channels[None, :] * channel_step,
                mask=row_exists[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            right = tl.load(
                numbers + channels[:, None] * basis_row + columns[None, :] * basis_column,
                mask=inside[:, None] & (columns < width)[None, :],
                other=0.0,
            )
            turned += tl.dot(left, right, input_precision="ieee")
    return turned


@triton.jit(do_not_specialize=["splits", "coded_splits"])
def join_coded_splits(
    largest_in, sums_in, products_in, joined, ends, splits, coded_splits, value_width,
    SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Join the splits of one query row of one pair, some channels: weighted by maxima, divided by the sum of weights.

    Coded splits and dense ones apart: (2, pairs times rows, channels). `ends` gets the row's maximum and that sum.
    """
    rows, row = tl.num_programs(1), tl.program_id(1)
    pair = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, SPLITS)
    place = (pair * splits + number) * rows + row
    largest = tl.load(largest_in + place, mask=number < splits, other=LEAST)
    top = tl.max(largest, axis=0)
    total = tl.sum(tl.load(sums_in + place, mask=number < splits, other=0.0) * tl.exp2(largest - top), axis=0)
    channels = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    coded, dense = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for first in range(0, splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        split_place = (pair * splits + split) * rows + row
        share = tl.exp2(tl.load(largest_in + split_place, mask=split < splits, other=LEAST) - top) / total
        products = tl.load(
            products_in + split_place[:, None] * value_width + channels[None, :],
            mask=(split < splits)[:, None] & (channels < value_width)[None, :],
            other=0.0,
        )
        products *= share[:, None]
        of_coded = (split < coded_splits)[:, None]
        coded += tl.sum(tl.where(of_coded, products, 0.0), axis=0)
        dense += tl.sum(tl.where(of_coded, 0.0, products), axis=0)
    row_place, all_rows = pair * rows + row, tl.num_programs(0).to(tl.int64) * rows
    tl.store(joined + row_place * value_width + channels, coded, mask=channels < value_width)
    tl.store(joined + (all_rows + row_place) * value_width + channels, dense, mask=channels < value_width)
    if tl.program_id(2) == 0:
        tl.store(ends + row_place, top)
        tl.store(ends + all_rows + row_place, total)


@triton.jit
def turn_values(
    joined, pairs, output, heads, value_width,
    GROUP: tl.constexpr, LENGTH: tl.constexpr, ROW_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The output: sums of coded values times their basis, plus those of dense ones."""
    number = tl.program_id(0)
    pair, b, h = number.to(tl.int64), (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    rows = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    columns = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    row_exists = rows < GROUP * LENGTH
    needed = row_exists[:, None] & (columns < value_width)[None, :]
    coded = joined + (pair * GROUP * LENGTH + rows) * value_width
    dense = coded + tl.num_programs(0).to(tl.int64) * GROUP * LENGTH * value_width
    basis = tl.load(pairs + pair * PAIR_FIELDS + VALUE_BASIS)
    turned = times_basis(coded, 1, row_exists, basis, value_width, 1, value_width, columns, ROW_BLOCK, CHUNK)
    turned += tl.load(dense[:, None] + columns[None, :], mask=needed, other=0.0)
    target = ((b * LENGTH + rows % LENGTH) * heads * GROUP + h * GROUP + rows // LENGTH) * value_width
    tl.store(output + target[:, None] + columns[None, :], turned.to(output.dtype.element_ty), mask=needed)


@triton.jit(do_not_specialize=["newest"])
def receive(
    logits, ends, received, newest, GROUP: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Attention that some of one pair's newest tokens receive: sums over queries of p and p², and their number."""
    pair = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < newest
    rows = GROUP * LENGTH
    all_rows = tl.num_programs(0).to(tl.int64) * rows
    first, second = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in range(0, rows):
        row_place = pair * rows + row
        x = tl.load(logits + row_place * newest + tokens, mask=exists, other=float("-inf"))
        p = tl.exp2(x - tl.load(ends + row_place)) / tl.load(ends + all_rows + row_place)
        first += p
        second += p * p
    to = received + pair * 3 * newest + tokens
    tl.store(to, first / GROUP, mask=exists)
    tl.store(to + newest, second / GROUP, mask=exists)
    tl.store(to + 2 * newest, tl.minimum(newest - tokens, LENGTH).to(tl.float32), mask=exists)
